"""Turn rows of a data set into batches of tensors for one task and one model.

In go the name of a Hub dataset or local files, the columns to read, the model's configuration and its tokenizer or
image processor; out come dictionaries of tensors for `model(**batch)`. In the order of reading:

- `rows.py` loads a split and remembers which row of its file each one is; `processors.py` loads what turns text and
  images into tensors.
- `reader.py` says what every task does with rows: check them, draw samples, make batches. `registry.py` chooses the
  reader of a task: `classification.py` for texts and images, `generation.py` for text to generate, `image_text.py` for
  questions about images. To add a task, describe it in `hies_export/tasks.py` and register its reader.
- What they use: `labels.py`, `prompts.py` and `text_blocks.py` read columns; `images.py` opens images; `tokens.py`
  settles padding, length and vocabulary.
- `batches.py` says what a batch is, checks those that a caller made, and orders them by length. `targets.py` reads
  finished batches, and is all that scoring needs of this folder.
"""
