"""Read models and data sets from the Hub, or from its cache if the Hub does not answer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import get_session
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from ..errors import HiesError, RequestError, root_cause
from .internals import error_chain, hub_endpoint, hub_is_switched_off, hub_switched_off

logger = logging.getLogger(__name__)

# Seconds to wait for an answer, and until a Hub that gave none is asked again.
PATIENCE = 5.0
AGAIN_AFTER = 60.0

# Errors that say that the cache lacks something, rather than that its content is damaged.
_ABSENT = (LocalEntryNotFoundError, OfflineModeIsEnabled, ConnectionError)

# Endpoint -> when it was asked (`time.monotonic`), and why there was no answer; None if there was one.
_answers: dict[str, tuple[float, str | None]] = {}


@contextmanager
def hub_or_cache(
    name: str | Path, what: str, *, local_files_only: bool = False, error: type[RequestError] = RequestError
) -> Iterator[None]:
    """Let libraries read a repository inside the block: of the Hub, or of their caches if the Hub does not answer.

    By themselves they would try again for half a minute for every file; here the Hub is asked once whether it is there.
    If `name` is nowhere, an `error` says so of a `what`, such as "model".
    """
    reason = None if local_files_only or not _is_hub_id(name) else _why_unreachable()
    if reason is None:
        yield
        return
    try:
        with hub_switched_off():
            yield
    except Exception as failure:  # each library raises its own kind
        if isinstance(failure, HiesError) or not any(isinstance(cause, _ABSENT) for cause in error_chain(failure)):
            raise
        raise error(
            f"a {what} must be on this machine, on the Hub or complete in its cache, but {name} is not here, and the "
            f"Hub at {hub_endpoint()} {reason}; give a local path, or download it once while the Hub can be "
            "reached, and set HF_HUB_OFFLINE=1 afterwards"
        ) from failure
    if not hub_is_switched_off():
        logger.warning("the Hub at %s %s: the cached copy of %s is used", hub_endpoint(), reason, name)


def model_or_cache(path: str | Path, options: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return `hub_or_cache` for a model that is read with options of `from_pretrained`."""
    return hub_or_cache(path, "model", local_files_only=options.get("local_files_only", False))


def _is_hub_id(name: str | Path) -> bool:
    """Return whether a name may be that of a repository of the Hub, and is no local path."""
    with suppress(HFValidationError):
        validate_repo_id(str(name))
        return not os.path.exists(name)
    return False


def _why_unreachable() -> str | None:
    """Return why the Hub cannot be asked, as the end of "the Hub ..."; None if it gives any answer."""
    if hub_is_switched_off():
        return "is not asked, as HF_HUB_OFFLINE is set"
    endpoint, now = hub_endpoint(), time.monotonic()
    if endpoint in _answers:
        asked, reason = _answers[endpoint]
        if reason is None or now - asked < AGAIN_AFTER:
            return reason
    try:
        get_session().head(endpoint, timeout=PATIENCE)
        reason = None
    except Exception as failure:  # of the HTTP library, which differs between versions of the client
        reason = f"cannot be reached ({root_cause(failure, limit=100)})"
    _answers[endpoint] = (now, reason)
    return reason
