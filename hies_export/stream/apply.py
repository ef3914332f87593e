"""Cut a checkpoint on disk by a plan: only the rows and columns that stay are read, and the model is never loaded.

The result is, byte for byte, what loading the model, `prune_units` and `save_pretrained` would write, in the memory of
a few blocks.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import remove_tied_weights_from_state_dict
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..checkpoint.folders import new_folder, refuse_existing
from ..errors import ReloadMismatchError, RequestError, UnsupportedModelError
from ..model.linear import weight_axis
from ..model.tokens import synthetic_batch
from ..progress import SILENT, Progress
from ..prunable.attention import find_attention
from ..prunable.follow import feature_cuts, row_cuts
from ..slim.check import check_selection, check_weights
from ..slim.config import is_slim
from ..slim.cut import prune_units
from ..values import PrunableModule, PruningPlan
from .renaming import Step, saving_steps
from .shards import ShardWriter, StoredTensor, as_bytes, read_blocks, read_tensor
from .skeleton import SIDE_FILES, build_skeleton, fetch, read_tensors

# The default of `save_pretrained`: the same tensors go into the same files.
MAX_SHARD_SIZE = "50GB"

Cuts = Mapping[str, Mapping[int, Tensor]]  # name of a parameter -> axis -> indices that stay


@dataclass(frozen=True)
class Applied:
    """What `apply_plan` did.

    Attributes:
        folder: The slim checkpoint.
        dense_bytes: Size of the tensors of the checkpoint it was cut from.
        slim_bytes: Size of the tensors that were written.
        seconds: From reading the headers to the finished folder.
    """

    folder: Path
    dense_bytes: int
    slim_bytes: int
    seconds: float


def apply_plan(
    plan: PruningPlan,
    model: str | Path,
    folder: str | Path,
    *,
    batch: Mapping[str, Tensor] | None = None,
    max_shard_size: int | str = MAX_SHARD_SIZE,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Applied:
    """Cut a checkpoint of safetensors by a plan, tensor by tensor.

    Peak memory does not depend on the model's size, except where transformers merges or splits tensors on loading
    (mixtures of experts) and the result needs them merged: those are held one group at a time.

    Args:
        plan: The heads that stay.
        model: The dense checkpoint, a folder or a Hub id; its weights are read as the dtype `load` would give them.
        folder: Where to write; appears only when everything is written and checked.
        batch: Two short samples by which the attention is found; by default random ones.
        max_shard_size: Bytes, or such as "5GB": as in `save_pretrained`.
        overwrite: Replace an existing folder.
        progress: Told of the tensors as they are written.

    Returns:
        Sizes and seconds.

    Raises:
        PlanError: The plan is not for this model, or for other weights.
        RequestError: The checkpoint has no safetensors, or they are damaged, incomplete or not the model's.
        UnsupportedModelError: The attention of this model cannot be cut.
        OutputExistsError: The folder exists and `overwrite` is off.
        ReloadMismatchError: What was written is not what the slim model needs; nothing is kept.

    Examples:
        >>> model.save_pretrained(folder / "dense")
        >>> applied = apply_plan(plan, folder / "dense", folder / "slim")
        >>> applied.slim_bytes < applied.dense_bytes
        True
    """
    start = time.perf_counter()
    refuse_existing(folder, overwrite=overwrite)
    source = fetch(model)
    tensors = read_tensors(source)
    dense, origins = build_skeleton(source, tensors)
    modules = _find_modules(dense, plan, batch)
    check_selection(plan.kept, modules)
    check_weights(plan, _norms(plan, origins, tensors))
    cuts = _cuts(dense, plan, modules)
    slim = prune_units(dense, plan, modules, inplace=True)
    parameters = _parameters(slim)
    # A slim class keeps the names of its modules on disk; see `modeling_hies.SlimModel.save_pretrained`.
    if is_slim(slim):
        written = parameters
        steps = [Step((name,), (name,)) for name in parameters]
    else:
        written = revert_weight_conversion(slim, dict(parameters))
        steps = saving_steps(slim, parameters)
    _check(written, parameters, steps, origins, tensors, cuts)
    copier = _Copier(tensors, origins, parameters, cuts, written)
    split = split_torch_state_dict_into_shards(
        written, filename_pattern="model{suffix}.safetensors", max_shard_size=max_shard_size
    )
    with new_folder(folder, overwrite=overwrite) as temporary:
        slim.save_pretrained(temporary, state_dict={})  # configs, and the slim class where it is needed
        _copy_side_files(source, temporary)
        (temporary / "hies_plan.json").write_text(plan.to_json(), encoding="utf-8")
        with contextlib.ExitStack() as stack:
            writers = {}
            for file, names in split.filename_to_tensors.items():
                writer = stack.enter_context(ShardWriter(temporary / file, {n: written[n] for n in names}))
                writers.update(dict.fromkeys(names, writer))
            # From the front of a file to its end: disks like it, and the source's order is mostly the same.
            places = {name: (split.tensor_to_filename[name], writer.offsets[name]) for name, writer in writers.items()}
            steps = sorted(steps, key=lambda step: places[step.targets[0]])
            for step in progress.track(steps, "cut"):
                for name, blocks in copier.read(step):
                    writers[name].write(name, blocks)
        if split.is_sharded:
            index = {
                "metadata": {"total_parameters": slim.num_parameters(), **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (temporary / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")
        _check_written(temporary, written)
    return Applied(
        folder=Path(folder),
        dense_bytes=sum(t.bytes for t in tensors.values()),
        slim_bytes=sum(t.nbytes for t in written.values()),
        seconds=time.perf_counter() - start,
    )


class _Copier:
    """Makes the tensors of the new checkpoint out of those of the old.

    Args:
        tensors: Of the old checkpoint.
        origins: Parameter -> what it is loaded from.
        parameters: Of the slim model, on the meta device.
        cuts: What stays of them.
        written: Tensors of the new checkpoint, on the meta device.
    """

    def __init__(
        self,
        tensors: Mapping[str, StoredTensor],
        origins: Mapping[str, Step],
        parameters: Mapping[str, Tensor],
        cuts: Cuts,
        written: Mapping[str, Tensor],
    ):
        self._tensors = tensors
        self._origins = origins
        self._parameters = parameters
        self._cuts = cuts
        self._written = written
        self._buffer = bytearray()

    def read(self, step: Step) -> Iterator[tuple[str, Iterator[memoryview]]]:
        """The names and bytes of the tensors that a step of saving gives."""
        origins = [self._origins[name] for name in step.sources]
        if step.convert is None and origins[0].convert is None:
            stored = self._tensors[origins[0].sources[0]]
            yield step.targets[0], self._blocks(stored, step.targets[0], self._cuts.get(step.sources[0], {}))
        elif self._comes_back(step, origins):
            for name in step.targets:
                yield name, self._blocks(self._tensors[name], name, {})
        else:
            values: dict[str, Tensor] = {}
            for name, origin in zip(step.sources, origins, strict=True):
                if name not in values:
                    values.update(self._load(name, origin))
            values = {name: _cut(values[name], self._cuts.get(name, {})) for name in step.sources}
            saved = step.convert(values) if step.convert else {step.targets[0]: values[step.sources[0]]}
            del values
            for name in step.targets:
                yield name, iter([as_bytes(saved.pop(name))])

    def _blocks(self, stored: StoredTensor, name: str, kept: Mapping[int, Tensor]) -> Iterator[memoryview]:
        return read_blocks(stored, kept, self._written[name].dtype, self._buffer)

    def _comes_back(self, step: Step, origins: Sequence[Step]) -> bool:
        """Whether what is merged or split on loading is taken apart or put together again on saving, untouched."""
        stored = {name for origin in origins for name in origin.sources}
        if step.convert is None or any(origin.convert is None for origin in origins):
            return False
        # A cut would change a shape.
        return all(
            name in stored
            and self._tensors[name].shape == tuple(self._written[name].shape)
            and self._tensors[name].dtype == self._written[name].dtype
            for name in step.targets
        )

    def _load(self, name: str, origin: Step) -> dict[str, Tensor]:
        dtype = self._parameters[name].dtype
        read = {key: read_tensor(self._tensors[key], dtype, self._buffer) for key in origin.sources}
        return origin.convert(read) if origin.convert else {name: read[origin.sources[0]]}


def _cut(tensor: Tensor, kept: Mapping[int, Tensor]) -> Tensor:
    for axis, index in kept.items():
        tensor = tensor.index_select(axis, index)
    return tensor


def _find_modules(
    model: PreTrainedModel, plan: PruningPlan, batch: Mapping[str, Tensor] | None
) -> tuple[PrunableModule, ...]:
    """Return the attention modules, those of an image tower included where the plan names them."""
    found = find_attention(model, batch or synthetic_batch(model, batch=2, sequence=3))
    modules = {module.name: module for module in found}
    for name, tower in model.named_modules():
        inside = [n for n in plan.kept if n not in modules and n.startswith(f"{name}.")]
        if batch is None and name and inside and getattr(tower, "main_input_name", "") == "pixel_values":
            assert isinstance(tower, PreTrainedModel)
            for module in find_attention(tower, synthetic_batch(tower, batch=2)):
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


def _norms(plan: PruningPlan, origins: Mapping[str, Step], tensors: Mapping[str, StoredTensor]) -> dict[str, float]:
    """L2 norms of the layers a plan remembers, block by block; see `weight_norms`."""
    norms = {}
    for name in plan.model:
        origin = origins.get(f"{name}.weight")
        if origin is None or origin.convert is not None:
            continue
        stored = tensors[origin.sources[0]]
        blocks = read_blocks(stored, {}, stored.dtype, bytearray())
        squares = (torch.frombuffer(block, dtype=stored.dtype).double().pow(2).sum().item() for block in blocks)
        norms[name] = math.sqrt(sum(squares))
    return norms


def _cuts(model: PreTrainedModel, plan: PruningPlan, modules: Sequence[PrunableModule]) -> dict[str, dict[int, Tensor]]:
    """Return what `prune_units` leaves of which parameter, by the axes of its tensor."""
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


def _parameters(model: PreTrainedModel) -> dict[str, Tensor]:
    """What `save_pretrained` saves, under the names of the modules."""
    state = model.state_dict()
    for name in model._keys_to_ignore_on_save or ():
        state.pop(name, None)
    return remove_tied_weights_from_state_dict(state, model)


def _check(
    written: Mapping[str, Tensor],
    parameters: Mapping[str, Tensor],
    steps: Sequence[Step],
    origins: Mapping[str, Step],
    tensors: Mapping[str, StoredTensor],
    cuts: Cuts,
) -> None:
    """Refuse, before anything is written, what would not come out as the slim model needs it."""
    unknown = sorted(set(parameters) - set(origins))
    if unknown:
        raise RequestError(
            f"every parameter must be in the files, but {', '.join(unknown[:3])} are not; load the model once and "
            "save_pretrained it"
        )
    if sorted(name for step in steps for name in step.targets) != sorted(written):
        odd = sorted({name for step in steps for name in step.targets} ^ set(written))
        raise UnsupportedModelError(f"the tensors of the files cannot be told from the model's: {', '.join(odd[:3])}")
    for name, tensor in parameters.items():
        origin = origins[name]
        if origin.convert is None:
            shape = list(tensors[origin.sources[0]].shape)
            for axis, index in cuts.get(name, {}).items():
                shape[axis] = len(index)
            if shape != list(tensor.shape):
                raise UnsupportedModelError(
                    f"{name} must have the shape {tuple(tensor.shape)} after the cut, but {tuple(shape)} would be left "
                    "of it: it is shared by several attention modules"
                )


def _copy_side_files(source: Path, folder: Path) -> None:
    """Tokenizer and processor files, as they are; what speaks of the dense model only stays behind."""
    for path in sorted(source.iterdir()):
        wanted = any(fnmatch(path.name, pattern) for pattern in SIDE_FILES)
        of_dense = path.name.endswith(".index.json") or path.name in ("generation_config.json", "hies_plan.json")
        if path.is_file() and wanted and not of_dense and not (folder / path.name).exists():
            shutil.copyfile(path, folder / path.name)


def _check_written(folder: Path, written: Mapping[str, Tensor]) -> None:
    """Read the headers again, and see that they make the model that the folder's config describes.

    Raises:
        ReloadMismatchError: They do not.
    """
    try:
        tensors = read_tensors(folder)
        build_skeleton(folder, tensors)
    except RequestError as error:
        raise ReloadMismatchError(f"what was written does not load again: {error}; nothing was kept") from error
    found = {name: (t.shape, t.dtype) for name, t in tensors.items()}
    if found != {name: (tuple(t.shape), t.dtype) for name, t in written.items()}:
        raise ReloadMismatchError("what was written is not what was to be written; nothing was kept")
