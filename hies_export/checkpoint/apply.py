"""Cut a checkpoint by a plan, from folder to folder."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from ..data.processors import load_processor
from ..errors import PlanError
from ..kinds import ATTENTION
from ..model.text_encoder import Unwrapped
from ..model.tokens import sample_batch
from ..progress import SILENT, Progress
from ..select.fingerprint import fingerprint
from ..select.plan import PruningPlan
from ..slim.cut import prune_units
from ..tasks import task_of
from ..units.find import find_modules
from ..units.units import PrunableModule
from ..vocabulary.embeddings import row_count
from ..vocabulary.kept import KeptTokens
from ..vocabulary.trim import apply_kept
from .beside import fetch_whole
from .classes import load_config, refuse_quantised
from .folders import new_folder, refuse_existing
from .load import load
from .save import load_refit, read_refit, warn_uncompensated, write_slim
from .sentence import kind_in, load_sentence
from .weights import load_weights, stored_dtype, weight_bytes, weight_files


@dataclass(frozen=True)
class Applied:
    """A slim checkpoint that `apply_plan` wrote, and the sizes of the weight files before and after."""

    folder: Path
    dense_bytes: int
    slim_bytes: int
    seconds: float  # wall time, all included


def apply_plan(
    plan: PruningPlan,
    model: str | Path,
    folder: str | Path,
    *,
    batch: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
    force: bool = False,
    refit: str | Path | None = None,
    progress: Progress = SILENT,
) -> Applied:
    """Load a checkpoint, cut it by a plan, save it, and check that it loads again.

    The weights are saved in the dtype that the checkpoint is stored in. With the refitted layers of a compensated run,
    they equal those of the run. The tokenizer, the processor and the licence come along; see `COMPANIONS`.

    Args:
        plan: The units that stay.
        model: The dense checkpoint, a folder or a Hub id.
        folder: Where to write; appears only when everything is written and checked.
        batch: Two short samples, on which the modules are found and the saved model is compared; random by default.
        overwrite: Replace an existing folder.
        force: Cut even if the plan was made for other weights; the written plan names these weights.
        refit: The refitted layers of a compensated model, the `refit.safetensors` that was written with the plan.
            Without it, such a plan is applied with a warning.
        progress: Follows the stages.

    Returns:
        The folder, the sizes and the time.

    Raises:
        PlanError: The plan is not for this model, or for other weights; or the refitted layers are not of this plan.
        RequestError: The checkpoint does not load, or is quantised.
        UnsupportedModelError: Modules of the plan's kinds cannot be cut in this model.
        OutputExistsError: The folder exists and `overwrite` is off, or it is, holds or lies inside the dense one.
        ReloadMismatchError: The saved model does not load again as the one that was cut; nothing is kept.

    Examples:
        >>> model.save_pretrained(folder / "dense")
        >>> applied = apply_plan(plan, folder / "dense", folder / "slim")
        >>> applied.slim_bytes < applied.dense_bytes
        True
    """
    start = time.perf_counter()
    refitted = None if refit is None else read_refit(plan, Path(refit))
    inputs = {"model": model} if refit is None else {"model": model, "refitted layers": refit}
    refuse_existing(folder, overwrite=overwrite, inputs=inputs)
    progress.stage("load the model")
    unwrapped = _load(model)
    dense, source, processor = unwrapped.model, unwrapped.folder, None
    unwrapped = replace(unwrapped, model=None)  # so that it does not keep the dense weights in memory
    assert source is not None
    progress.stage("cut")
    if plan.vocabulary:
        kept = KeptTokens(plan.vocabulary, row_count(dense))
        if kept.rows[-1] >= kept.total:
            raise PlanError(
                f"a plan must be for the model it is applied to, but it keeps token {kept.rows[-1]}, and this model "
                f"has {kept.total:,}; make a plan for this model"
            )
        dense, processor = apply_kept(dense, load_processor(source, task=type(task_of(dense))), kept)
    modules = _find_modules(dense, plan, batch)
    if force:
        plan = replace(plan, model=fingerprint(dense, modules))
    sample = batch or sample_batch(dense, sequence=3)
    slim = prune_units(dense, plan, modules, inplace=True)
    del dense
    if refitted is not None:
        load_refit(slim, refitted)
    saved_plan = replace(plan, compensation={}) if refitted is None else plan
    progress.stage("save, load again and compare")
    with new_folder(folder, overwrite=overwrite) as temporary:
        write_slim(slim, temporary, plan=saved_plan, batch=sample, given=unwrapped, processor=processor)
        if plan.compensation and refitted is None:
            warn_uncompensated(plan)
    return Applied(
        folder=Path(folder),
        dense_bytes=weight_bytes(source),
        slim_bytes=weight_bytes(folder),
        seconds=time.perf_counter() - start,
    )


def _load(model: str | Path) -> Unwrapped:
    """Load a checkpoint in the dtype that it is stored in; return its model and the folder of its weights."""

    def load_stored(model_class: type[PreTrainedModel], folder: Path, config: Any) -> PreTrainedModel:
        refuse_quantised(config, folder)
        dtype = stored_dtype(weight_files(folder), load_config(folder)) or "auto"
        return load_weights(model_class, folder, config=config, dtype=dtype)

    if kind_in(model) is not None:
        return load_sentence(model, load=load_stored)
    source = fetch_whole(model)
    config = load_config(source)
    refuse_quantised(config, source)
    return Unwrapped(load(source, dtype=stored_dtype(weight_files(source), config) or "auto"), folder=source)


def _find_modules(
    model: PreTrainedModel, plan: PruningPlan, batch: Mapping[str, Tensor] | None
) -> tuple[PrunableModule, ...]:
    """Return the modules of the plan's kinds, in its order, and those of an image tower if the plan names them."""
    kinds = tuple(dict.fromkeys(kept.kind for kept in plan.kept.values())) or (ATTENTION,)
    modules = find_modules(model, batch or sample_batch(model, sequence=3), kinds=kinds)
    by_name = {module.name: module for module in modules}
    for name, submodel in model.named_modules():
        missing = [kept for kept in plan.kept if kept not in by_name and kept.startswith(f"{name}.")]
        # A random batch may not reach an image tower, so it is run alone.
        if batch is None and name and missing and getattr(submodel, "main_input_name", "") == "pixel_values":
            assert isinstance(submodel, PreTrainedModel)
            for module in find_modules(submodel, sample_batch(submodel), kinds=kinds):
                by_name.setdefault(f"{name}.{module.name}", module.inside(name))
    positions = {name: position for position, name in enumerate(plan.kept)}
    return tuple(sorted(by_name.values(), key=lambda module: positions.get(module.name, len(positions))))
