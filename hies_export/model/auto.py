"""Look up the Auto classes of transformers."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto


def auto_classes(name: str, model_type: str) -> list[str]:
    """Return the names of the AutoModel classes that load a model class, which is given by its name."""
    found = []
    for constant, auto_class in modeling_auto.__dict__.items():
        if constant.startswith("AutoModel") and hasattr(auto_class, "_model_mapping"):
            # The inner mapping holds names, so that no model has to be imported.
            names = auto_class._model_mapping._model_mapping.get(model_type, ())
            if name in ((names,) if isinstance(names, str) else names):
                found.append(constant)
    return found


def has_auto_base(model: PreTrainedModel) -> bool:
    """Return whether `AutoModel` loads the base model of a model; for some types it loads another class."""
    return "AutoModel" in auto_classes(type(model.base_model).__name__, model.config.model_type)
