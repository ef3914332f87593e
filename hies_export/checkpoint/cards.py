"""Read the metadata of a model's card, and carry its licence over to a slim model's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCardData, hf_hub_download, metadata_load
from huggingface_hub.errors import HfHubHTTPError

from ..errors import RequestError
from ..model.online import hub_or_cache
from .companions import CARD

# Metadata that the card of a slim model inherits from the dense model's.
LICENSE_KEYS = ("license", "license_name", "license_link")
_KEYS = ("base_model", *LICENSE_KEYS)
_TEXT = "# A slim checkpoint, cut by hies-export\n"


def read_card(model: str | Path) -> dict[str, Any]:
    """Return `base_model` and the licence of a model's card, from its folder or else from the Hub; empty without any.

    The card comes from outside, so anything but text and lists of text is left out.
    """
    try:
        with hub_or_cache(model, "model card"):
            file = Path(model) / CARD if Path(model).is_dir() else hf_hub_download(str(model), CARD)
        found = metadata_load(file)
    except (RequestError, HfHubHTTPError, OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    if not isinstance(found, dict):
        return {}
    return {key: found[key] for key in _KEYS if _is_text(found.get(key))}


def _is_text(value: Any) -> bool:
    return all(isinstance(text, str) for text in (value if isinstance(value, list) else [value]))


def under_licence(text: str | None, source: Path | None) -> str | None:
    """Return a card with the licence that the card in a folder names; None if there is neither a text nor a licence."""
    named = {} if source is None else read_card(source)
    licence = {key: named[key] for key in LICENSE_KEYS if key in named}
    if text is None and not licence:
        return None
    metadata = ModelCardData(library_name="transformers", tags=["hies-export", "pruning"], **licence).to_yaml()
    return f"---\n{metadata}\n---\n\n{text or _TEXT}"
