"""Write the tensors of a slim checkpoint from those of the dense one, a few blocks at a time."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from huggingface_hub import split_state_dict_into_shards_factory
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from ..checkpoint.tensors import StoredTensor, as_bytes, read_blocks, read_tensor
from ..errors import RequestError, UnsupportedModelError
from ..model import internals
from ..progress import Progress
from ..slim.config import is_slim
from .renaming import Step, saving_steps
from .shards import ShardWriter

Cuts = Mapping[str, Mapping[int, Tensor]]
"""Name of a parameter -> axis -> indices that stay."""


class Rewrite:
    """Knows how the tensors of a slim checkpoint come from those of the dense one.

    `slim` is on the meta device, as are the tensors of the slim checkpoint, `written`. `origins` has the step of
    loading that makes each parameter. A `refitted` parameter replaces the dense one.
    """

    def __init__(
        self,
        slim: PreTrainedModel,
        tensors: Mapping[str, StoredTensor],
        origins: Mapping[str, Step],
        cuts: Cuts,
        *,
        refitted: Mapping[str, StoredTensor],
    ):
        self._total_parameters = slim.num_parameters()
        # A refitted parameter comes from one tensor, under a name that no checkpoint has.
        own = {name: f"refitted:{name}" for name in refitted}
        self._tensors = {**tensors, **{own[name]: tensor for name, tensor in refitted.items()}}
        self._origins = {**origins, **{name: Step((source,), (name,)) for name, source in own.items()}}
        self._cuts = {name: kept for name, kept in cuts.items() if name not in own}
        self._parameters = internals.without_tied(internals.saved_state(slim), slim)
        # A slim class keeps the names of its modules on disk; see `modeling_hies.SlimModel.save_pretrained`.
        if is_slim(slim):
            self.written = self._parameters
            self._steps = [Step((name,), (name,)) for name in self._parameters]
        else:
            self.written = internals.names_on_disk(slim, self._parameters)
            self._steps = saving_steps(slim, self._parameters)
        self._buffer = bytearray()
        self._check()

    def _check(self) -> None:
        unknown = sorted(set(self._parameters) - set(self._origins))
        if unknown:
            raise RequestError(
                f"every parameter must be in the files, but {', '.join(unknown[:3])} are not; load the model once and "
                "save_pretrained it"
            )
        targets = [name for step in self._steps for name in step.targets]
        if sorted(targets) != sorted(self.written):
            odd = sorted(set(targets) ^ set(self.written))
            raise UnsupportedModelError(
                f"the tensors of the files must follow from the model's, but these do not: {', '.join(odd[:3])}"
            )
        for name, tensor in self._parameters.items():
            origin = self._origins[name]
            if origin.convert is not None:
                continue
            shape = list(self._tensors[origin.sources[0]].shape)
            for axis, index in self._cuts.get(name, {}).items():
                shape[axis] = len(index)
            if shape != list(tensor.shape):
                raise UnsupportedModelError(
                    f"{name} must have the shape {tuple(tensor.shape)} after the cut, but {tuple(shape)} would be left "
                    "of it: it is shared by several attention modules"
                )

    def write(self, folder: Path, max_shard_size: int | str, progress: Progress) -> None:
        """Write the weights of the slim checkpoint, in the files and the layout of `save_pretrained`."""
        # As `save_pretrained` does: views of one tensor, such as the experts of a merged one, go into one file.
        split = split_state_dict_into_shards_factory(
            self.written,
            get_storage_size=lambda tensor: tensor.untyped_storage().nbytes(),
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_shard_size,
        )
        with contextlib.ExitStack() as stack:
            writers = {}
            for file, names in split.filename_to_tensors.items():
                writer = stack.enter_context(ShardWriter(folder / file, {n: self.written[n] for n in names}))
                writers.update(dict.fromkeys(names, writer))
            # Disks are fastest from the front of a file to its end, and the dense order is mostly the same.
            places = {name: (split.tensor_to_filename[name], writer.offsets[name]) for name, writer in writers.items()}
            for step in progress.track(sorted(self._steps, key=lambda step: places[step.targets[0]]), "cut"):
                for name, blocks in self._read(step):
                    writers[name].write(name, blocks)
        if split.is_sharded:
            index = {
                "metadata": {"total_parameters": self._total_parameters, **split.metadata},
                "weight_map": split.tensor_to_filename,
            }
            text = json.dumps(index, indent=2, sort_keys=True) + "\n"
            (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(text, encoding="utf-8")

    def _read(self, step: Step) -> Iterator[tuple[str, Iterator[memoryview]]]:
        """Yield the names and bytes of the tensors that a step of saving makes."""
        origins = [self._origins[name] for name in step.sources]
        if step.convert is None and origins[0].convert is None:
            stored = self._tensors[origins[0].sources[0]]
            yield step.targets[0], self._blocks(stored, step.targets[0], self._cuts.get(step.sources[0], {}))
        elif self._is_undone(step, origins):
            for name in step.targets:
                yield name, self._blocks(self._tensors[name], name, {})
        else:
            values: dict[str, Tensor] = {}
            for name, origin in zip(step.sources, origins, strict=True):
                if name not in values:
                    loaded = self._load(name, origin)
                    values.update({key: v for key, v in loaded.items() if self._origins.get(key, origin) is origin})
                    del loaded
            values = {name: _cut(values[name], self._cuts.get(name, {})) for name in step.sources}
            saved = step.convert(values) if step.convert else {step.targets[0]: values[step.sources[0]]}
            del values
            for name in step.targets:
                yield name, iter([as_bytes(saved.pop(name))])

    def _blocks(self, stored: StoredTensor, name: str, kept: Mapping[int, Tensor]) -> Iterator[memoryview]:
        return read_blocks(stored, kept, self.written[name].dtype, self._buffer)

    def _is_undone(self, step: Step, origins: Sequence[Step]) -> bool:
        """Return whether a step of saving only undoes what loading merged or split, so that the files can be copied."""
        if step.convert is None or any(origin.convert is None for origin in origins):
            return False
        stored = {name for origin in origins for name in origin.sources}
        # A cut would change a shape.
        return all(
            name in stored
            and self._tensors[name].shape == tuple(self.written[name].shape)
            and self._tensors[name].dtype == self.written[name].dtype
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
