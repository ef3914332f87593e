"""Remove tokens that nobody uses: texts -> the tokens that stay -> a smaller tokenizer, and a model with their rows.

- `kept.py` finds the tokens that stay, so that the texts are cut as before.
- `tokenizer.py` makes the tokenizer of these tokens, and compares how both cut texts.
- `embeddings.py` cuts the rows of a model, and compares its outputs with the dense model's.
- `trim.py` does all of it, and says what it did to texts that were not given.
"""
