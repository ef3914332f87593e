"""Remove tokens that nobody uses: texts -> the tokens that stay -> a smaller tokenizer, and a model with their rows.

- `chat.py` gives what a chat template puts around texts.
- `kept.py` finds the tokens that stay, so that the texts are cut as before.
- `tokenizer.py` makes the tokenizer of these tokens, and checks that both cut texts alike.
- `embeddings.py` cuts the rows of a model, and compares its outputs with the dense model's.
- `trim.py` does all of it.
- `recut.py` reads batches with these tokens, so that both models predict the same, and says what it does to them.
"""
