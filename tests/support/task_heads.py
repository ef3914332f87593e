"""Prove the classes that transformers has for a model type and a task: find, cut, compare, save, load, compare."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import UnsupportedModelError, find_modules
from hies_export.kinds import BOTH
from hies_export.model.tokens import sample_batch
from hies_export.tasks import TASKS
from support.architectures import NoTinyModel, tiny, tiny_batch
from support.contract import Subject, cut, reload, short_reason
from support.table_of_types import holds, neurons_of, read_table

SEQUENCE = 8
TASK_CLASSES = {name: task.auto_class for name, task in TASKS.items()}
# Not tasks of a recipe; `inspect`, `apply`, `export` and `bench` take these models too.
OTHER_CLASSES = {"multiple-choice": "AutoModelForMultipleChoice"}


@dataclass(frozen=True)
class Head:
    """A class that transformers has for a model type and a task."""

    model_type: str
    task: str
    name: str


@dataclass
class Proof:
    """What was found of a head."""

    cut: list[str] = field(default_factory=list)  # kinds of units that were cut, compared, saved and loaded
    refused: dict[str, str] = field(default_factory=dict)  # kind -> why
    untried: str = ""  # why no tiny model could be built
    failed: str = ""  # the error of a step

    @property
    def verdict(self) -> str:
        """Return one word: "both", "heads" or "neurons" (what can be cut), "refused", "untried" or "FAILED"."""
        if self.failed or self.untried:
            return "FAILED" if self.failed else "untried"
        if not self.cut:
            return "refused"
        return "both" if len(self.cut) == len(BOTH) else {"attention": "heads", "mlp": "neurons"}[self.cut[0]]


def supported_types() -> list[str]:
    """Return the model types whose heads or neurons can be cut in the class that they are tested with."""
    return [
        name for name, entry in read_table()["types"].items() if holds(entry, "cut") or holds(neurons_of(entry), "cut")
    ]


def heads_of(model_type: str, classes: dict[str, str]) -> Iterator[Head]:
    """Yield every class that transformers has for a model type and these tasks (task -> Auto class)."""
    for task, auto_class in classes.items():
        names = getattr(transformers, auto_class)._model_mapping._model_mapping.get(model_type, ())
        for name in (names,) if isinstance(names, str) else names:
            yield Head(model_type, task, name)


def prove(head: Head) -> Proof:
    """Take a tiny model of a head, on the inputs that `inspect` and `apply` make for it, through the contract.

    A model of images and text also gets both.
    """
    made = {"image-text-to-text": tiny_batch}.get(head.task, _sample)
    try:
        model, batch = tiny(head.model_type, head.name, made)
    except NoTinyModel as error:
        return _why_not(head, error)
    proof, kinds = Proof(), []
    try:
        for kind in BOTH:
            try:
                find_modules(model, sample_batch(model, sequence=SEQUENCE), kinds=(kind,))
                find_modules(model, batch, kinds=(kind,))
                kinds.append(kind)
            except UnsupportedModelError as error:
                proof.refused[kind] = short_reason(error)
        if kinds:
            subject = Subject(model, batch, tuple(kinds))
            cut(subject)
            reload(subject)
        proof.cut = kinds
    except Exception as error:
        proof.failed = f"{type(error).__name__}: {short_reason(error)}"
    return proof


def _sample(model: PreTrainedModel) -> dict[str, Tensor]:
    """Return the inputs that the package makes for a model, after running it on them."""
    batch = sample_batch(model, sequence=SEQUENCE)
    with torch.no_grad():
        output = model(**batch)[0]
    if not torch.isfinite(output).all():
        raise NoTinyModel("its output is not finite")
    return batch


def _why_not(head: Head, error: NoTinyModel) -> Proof:
    """Say whether the inputs that the package makes are to blame, or there is no tiny model at all."""
    try:
        tiny(head.model_type, head.name)
    except NoTinyModel:
        return Proof(untried=short_reason(error))
    return Proof(failed=f"inputs: {short_reason(error)}")
