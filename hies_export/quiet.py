"""Silence for libraries that talk while they work."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def quiet(*, verbose: bool = False) -> Iterator[None]:
    """Swallow warnings, log records and prints inside the block, and put every channel back afterwards.

    Process-wide while it lasts: what other threads print or log in the meantime is swallowed too.

    Args:
        verbose: Let everything through; the block then changes nothing.
    """
    if verbose:
        yield
        return
    disabled = logging.root.manager.disable
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore")
        logging.disable(logging.CRITICAL)
        try:
            yield
        finally:
            logging.disable(disabled)
