"""Turn rows of a data set into batches of tensors for one task and one model.

The input is the name of a Hub dataset or local files, the columns to read, the model's configuration and its tokenizer
or image processor; the output is dictionaries of tensors for `model(**batch)`. In the order of reading:

- `rows.py` loads a split and remembers the number of each row in its file;
  `processors.py` loads tokenizers and image processors.
- `reader.py` has the steps of every task: check rows, draw samples, make batches. A task (`hies_export/tasks/`) names
  its reader: `classification.py` for texts and images, `embedding.py` for texts to embed, `generation.py` for text to
  generate, `image_text.py` for questions about images.
- Their helpers: `labels.py` and `prompts.py` read columns; `images.py` opens images; `tokens.py` settles padding,
  length and vocabulary.
- `given.py` turns what a caller of `prune` holds into batches: a DataLoader, a list of batches or of texts, or a data
  set.
- `batches.py` defines a batch, checks batches that a caller made, and orders them by length. `targets.py` reads
finished batches; scoring needs nothing else of this folder.
"""
