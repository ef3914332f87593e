"""Cut a checkpoint on disk by a plan, without loading the model; only the rows and columns that stay are read.

The result is what `load`, `prune_units` and `save_pretrained` would write, byte for byte.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.folders import new_folder, refuse_existing
from ..checkpoint.refits import check_refit, read_refit, warn_uncompensated
from ..checkpoint.settings import complete_settings
from ..checkpoint.tensors import StoredTensor, read_blocks
from ..errors import ReloadMismatchError, RequestError
from ..kinds import ATTENTION
from ..model.linear import weight_axis
from ..model.tokens import sample_batch
from ..progress import SILENT, Progress
from ..prunable.find import find_modules
from ..prunable.follow import feature_cuts, row_cuts
from ..slim.check import check_selection
from ..slim.cut import prune_units
from ..slim.fingerprint import check_weights, fingerprint_of
from ..slim.siblings import families, family_note
from ..units import PrunableModule
from ..values import PruningPlan
from .companions import copy_companions
from .rewrite import Rewrite
from .skeleton import build_skeleton, fetch, read_tensors

# The default of `save_pretrained`: the same tensors go into the same files.
MAX_SHARD_SIZE = "50GB"


@dataclass(frozen=True)
class Applied:
    """A slim checkpoint that `apply_plan` wrote, and the sizes of the tensors that were read and written."""

    folder: Path
    dense_bytes: int
    slim_bytes: int
    seconds: float  # wall time, all included
    note: str = ""  # a note if the slim model is of another stock family, which computes the same


def apply_plan(
    plan: PruningPlan,
    model: str | Path,
    folder: str | Path,
    *,
    batch: Mapping[str, Tensor] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    force: bool = False,
    refit: str | Path | None = None,
    progress: Progress = SILENT,
) -> Applied:
    """Cut a checkpoint of safetensors by a plan, tensor by tensor.

    With the refitted layers of a compensated run, the weights are those of the run, byte for byte.

    Peak memory does not grow with the model. Tensors that transformers merges or splits on loading (mixtures of
    experts), and that the result needs merged, are held whole, one group at a time. Beside the weights, only files that
    belong to a checkpoint are copied; see `COMPANIONS`.

    Args:
        plan: The units that stay.
        model: The dense checkpoint, a folder or a Hub id. Its weights are written in the dtype that `load` gives them.
        folder: Where to write; appears only when everything is written and checked.
        batch: Two short samples, on which the modules are found; by default random ones.
        max_shard_size: Bytes, or such as "5GB", as in `save_pretrained`.
        overwrite: Replace an existing folder.
        force: Cut even if the plan was made for other weights; the written plan names these weights.
        refit: The refitted layers of a compensated model, the `refit.safetensors` that was written with the plan.
            Without it, such a plan is applied with a warning, which the card in the folder repeats.
        progress: Follows the tensors as they are written.

    Returns:
        The folder, the sizes and the time.

    Raises:
        PlanError: The plan is not for this model, or for other weights; or the refitted layers are not of this plan.
        RequestError: The checkpoint has no safetensors, or they are damaged, incomplete or not the model's.
        UnsupportedModelError: Modules of the plan's kinds cannot be cut in this model.
        OutputExistsError: The folder exists and `overwrite` is off, or it is, holds or lies inside the dense one.
        ReloadMismatchError: The written tensors are not those that the slim model needs; nothing is kept.

    Examples:
        >>> model.save_pretrained(folder / "dense")
        >>> applied = apply_plan(plan, folder / "dense", folder / "slim")
        >>> applied.slim_bytes < applied.dense_bytes
        True
    """
    start = time.perf_counter()
    layers = None if refit is None else read_refit(plan, Path(refit))
    given = {"model": model} if refit is None else {"model": model, "refitted layers": refit}
    refuse_existing(folder, overwrite=overwrite, inputs=given)
    source = fetch(model)
    tensors = read_tensors(source)
    dense, origins = build_skeleton(source, tensors)
    modules = _find_modules(dense, plan, batch)
    check_selection(plan.kept, modules)
    # Tensors that loading converts have no stored bytes to compare.
    steps = {name: origins.get(f"{name}.weight") for name in plan.model}
    stored = {name: step for name, step in steps.items() if step is None or step.convert is None}
    found = {name: _fingerprint(tensors[step.sources[0]]) for name, step in stored.items() if step is not None}
    if force:
        plan = replace(plan, model=found)
    check_weights({name: made for name, made in plan.model.items() if name in stored}, found)
    cuts = _cuts(dense, plan, modules)
    slim = prune_units(dense, plan, modules, inplace=True)
    if layers is not None:
        check_refit(layers, slim)
    written = replace(plan, compensation={}) if layers is None else plan
    rewrite = Rewrite(slim, tensors, origins, cuts, refitted={} if layers is None else layers.tensors)
    with new_folder(folder, overwrite=overwrite) as temporary:
        slim.save_pretrained(temporary, state_dict={})  # configs, and the slim class where it is needed
        copy_companions(source, temporary)
        complete_settings(slim, temporary)
        (temporary / "hies_plan.json").write_text(written.to_json(), encoding="utf-8")
        rewrite.write(temporary, max_shard_size, progress)
        _check_written(temporary, rewrite.written)
        if plan.compensation and layers is None:
            warn_uncompensated(plan, temporary)
    return Applied(
        folder=Path(folder),
        dense_bytes=sum(t.bytes for t in tensors.values()),
        slim_bytes=sum(t.nbytes for t in rewrite.written.values()),
        seconds=time.perf_counter() - start,
        note=family_note(*families(dense.config, slim.config)),
    )


def _find_modules(
    model: PreTrainedModel, plan: PruningPlan, batch: Mapping[str, Tensor] | None
) -> tuple[PrunableModule, ...]:
    """Return the modules of the plan's kinds, including those of an image tower if the plan names them."""
    kinds = tuple(dict.fromkeys(kept.kind for kept in plan.kept.values())) or (ATTENTION,)
    found = find_modules(model, batch or sample_batch(model, sequence=3), kinds=kinds)
    modules = {module.name: module for module in found}
    for name, tower in model.named_modules():
        inside = [n for n in plan.kept if n not in modules and n.startswith(f"{name}.")]
        if batch is None and name and inside and getattr(tower, "main_input_name", "") == "pixel_values":
            assert isinstance(tower, PreTrainedModel)
            for module in find_modules(tower, sample_batch(tower), kinds=kinds):
                module = _inside(name, module)
                modules.setdefault(module.name, module)
    order = {name: position for position, name in enumerate(plan.kept)}
    return tuple(sorted(modules.values(), key=lambda module: order.get(module.name, len(order))))


def _inside(outer: str, module: PrunableModule) -> PrunableModule:
    """Return a module of a submodel, under the names it has in the model."""
    return replace(
        module,
        name=f"{outer}.{module.name}",
        consumer=f"{outer}.{module.consumer}",
        slices=tuple(replace(part, tensor=f"{outer}.{part.tensor}") for part in module.slices),
    )


def _fingerprint(stored: StoredTensor) -> tuple[float, ...]:
    """Return the fingerprint of a tensor, read block by block; see `fingerprint_of`."""
    blocks = read_blocks(stored, {}, stored.dtype, bytearray())
    return fingerprint_of(torch.frombuffer(block, dtype=stored.dtype) for block in blocks)


def _cuts(model: PreTrainedModel, plan: PruningPlan, modules: Sequence[PrunableModule]) -> dict[str, dict[int, Tensor]]:
    """Return the indices that `prune_units` leaves: name of a parameter -> axis of its tensor -> indices."""
    cuts: dict[str, dict[int, Tensor]] = {}
    for module in modules:
        kept = plan.kept[module.name]
        for name, axis, index in feature_cuts(model, module, kept):
            layer = model.get_submodule(name)
            cuts.setdefault(f"{name}.weight", {})[weight_axis(layer, axis)] = index
            if axis == 0 and layer.bias is not None:
                cuts.setdefault(f"{name}.bias", {})[0] = index
        cuts.update({name: {0: index} for name, index in row_cuts(model, module, kept)})
    return cuts


def _check_written(folder: Path, written: Mapping[str, Tensor]) -> None:
    """Read the headers again, and compare them with the model that the folder's config describes."""
    try:
        tensors = read_tensors(folder)
        build_skeleton(folder, tensors)
    except RequestError as error:
        raise ReloadMismatchError(f"the written folder does not load again: {error}; nothing was kept") from error
    found = {name: (t.shape, t.dtype) for name, t in tensors.items()}
    if found != {name: (tuple(t.shape), t.dtype) for name, t in written.items()}:
        raise ReloadMismatchError("the written tensors are not the intended ones; nothing was kept")
