"""Load rows, read columns, and define the batches that models take; what a task makes of rows is in `tasks/`.

- `rows.py` loads a split, of a Hub data set or of local files, and remembers the number of each row in its file.
- `columns.py` reads columns of numbers and images.
- `processors.py` loads tokenizers and image processors, and settles padding, length and vocabulary.
- `batches.py` defines a batch, reads finished ones, and orders them by length.

The names here are those that tasks read rows with.
"""

# ruff: noqa: F401
from .batches import (
    CHAT_KEY,
    CHOICE_KEYS,
    GROUP_KEY,
    IGNORED,
    JUDGED_KEY,
    OWN_KEY,
    PIECE_KEY,
    TOKEN_PLACES,
    Batch,
    are_tokens,
    by_length,
    check_numbers,
    in_rows,
    inputs_of,
    padded,
    size_of,
)
from .columns import STRINGS, as_images, check_each, holds_images, image_of_row, is_number, kind_of, read_numbers
from .processors import (
    as_batch,
    check_vocabulary,
    encoded,
    give_padding,
    padding_token,
    position_ids,
    token_limit,
    tokenize,
    tokenizer_of,
)
from .rows import (
    column_values,
    common_values,
    has_one_value,
    load_rows,
    mapped_rows,
    own_columns,
    row_name,
    take,
)
