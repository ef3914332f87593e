"""Load rows, read columns, and define the batches that models take; what a task makes of rows is in `tasks/`.

- `rows.py` loads a split, of a Hub data set or of local files, and remembers the number of each row in its file.
- `columns.py` reads columns of numbers and images.
- `processors.py` loads tokenizers and image processors, and settles padding, length and vocabulary.
- `batches.py` defines a batch, reads finished ones, and orders them by length.

Tasks take the names of all four from here.
"""

# ruff: noqa: F403
from .batches import *
from .columns import *
from .processors import *
from .rows import *
