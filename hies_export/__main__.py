"""`python -m hies_export` is `hies-export`."""

from __future__ import annotations

import sys

from .cli.main import main

sys.exit(main())
