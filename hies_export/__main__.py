"""`python -m hies_export` is the command line."""

import sys

from .cli import main

sys.exit(main())
