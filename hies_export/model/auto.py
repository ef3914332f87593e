"""Look up the Auto classes of transformers."""

from __future__ import annotations

from transformers import PreTrainedModel
from transformers.models.auto import modeling_auto


def auto_classes(name: str, model_type: str) -> list[str]:
    """Names of the AutoModel classes under which transformers knows a model class."""
    found = []
    for constant, auto_class in modeling_auto.__dict__.items():
        if constant.startswith("AutoModel") and hasattr(auto_class, "_model_mapping"):
            # Plain dictionaries of class names behind a lazy mapping: nothing has to be imported to read them.
            names = auto_class._model_mapping._model_mapping.get(model_type, ())
            if name in ((names,) if isinstance(names, str) else names):
                found.append(constant)
    return found


def has_auto_base(model: PreTrainedModel) -> bool:
    """Whether `AutoModel` is the way to a model's base model: some have another class inside under that name."""
    return "AutoModel" in auto_classes(type(model.base_model).__name__, model.config.model_type)
