"""Write a slim checkpoint, and check that it loads as the model that was saved."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModel, PreTrainedModel

from ..data.targets import inputs_of
from ..equal import SAME_CODE, Difference
from ..errors import ReloadMismatchError, refusing
from ..model.copies import convert
from ..model.internals import (
    attention_undecided,
    auto_classes,
    configs_of,
    dtypes_in,
    exact_products,
    has_auto_base,
    layers_unwarned,
    saved_state,
)
from ..model.modes import evaluating
from ..model.sentence import TextEncoder
from ..slim.check import first_output
from ..slim.config import is_slim
from ..values import PruningPlan
from .cards import under_licence
from .classes import find_model_class
from .companions import CARD, DOCUMENTS, PROCESSORS, VOCABULARIES, copy_companions, documents_of
from .folders import new_folder
from .refits import REFIT
from .sentence import cross_encoder_in, load_sentence, write_json, write_modules
from .settings import complete_settings

HALF = (torch.float16, torch.bfloat16)


def save_slim(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    plan: PruningPlan,
    batch: Mapping[str, Tensor],
    processor: Any = None,
    dense: Path | None = None,
    dtype: torch.dtype | None = None,
    refitted: Mapping[str, Tensor] | None = None,
    card: str | None = None,
    files: Mapping[str, Any] | None = None,
    overwrite: bool = False,
) -> float:
    """Save a slim model, load it again through every class that users may load it by, and compare.

    Both sides of the comparison are in the dtype that is saved. Of a `TextEncoder`, the folder is at once the
    checkpoint of its encoder and a SentenceTransformer, see `write_modules`.

    Args:
        model: The slim model.
        folder: Where to write; appears only when everything is written and checked.
        plan: Saved as `hies_plan.json`.
        batch: Inputs on which the saved and the loaded models are compared.
        processor: Tokenizer or image processor to save with the model.
        dense: Folder of the dense model, whose vocabularies are copied, and without a `processor` also the files of its
            own. Documents such as the licence come from there, or else from where the model was loaded.
        dtype: Dtype to save in; by default the model's own. The model is not changed. Parameters that transformers
            keeps in float32 stay in float32.
        refitted: Parameters that compensation changed, to write as `refit.safetensors` beside the plan; their digest
            should be the plan's.
        card: Text to write as README.md, below the dense model's licence as metadata.
        files: Content of further JSON files, by name; by default those that make the folder a CrossEncoder, if `dense`
            is one.
        overwrite: Replace an existing folder.

    Returns:
        The largest absolute difference of any output between the saved and the loaded models.

    Raises:
        OutputExistsError: The folder exists and `overwrite` is off.
        ReloadMismatchError: A weight is missing on loading, or an output differs by more than 1e-4 of its largest
            element, or of 1 if that is more.

    Examples:
        >>> save_slim(slim, folder / "slim", plan=plan, batch=batches[0])
        0.0
    """
    with new_folder(folder, overwrite=overwrite) as written:
        if dtype is not None and dtype != model.dtype:
            model = convert(model, dtype=dtypes_in(model, dtype))
        saved = model.auto_model if isinstance(model, TextEncoder) else model
        with attention_undecided(configs_of(saved)):
            saved.save_pretrained(written)
        if processor is not None:
            processor.save_pretrained(written)
        source = dense or documents_of(model)
        if source is not None:
            of_tokenizer = () if dense is None else VOCABULARIES if processor is not None else PROCESSORS
            copy_companions(source, written, (*of_tokenizer, *DOCUMENTS))
        if isinstance(model, TextEncoder):
            write_modules(model, written)
        elif files is None and dense is not None:
            files = cross_encoder_in(dense)
        for name, content in (files or {}).items():
            write_json(written / name, content)
        complete_settings(saved, written)
        (written / "hies_plan.json").write_text(plan.to_json(), encoding="utf-8")
        if refitted is not None:
            save_file(dict(refitted), written / REFIT)
        card = under_licence(card, source)
        if card is not None:
            (written / CARD).write_text(card, encoding="utf-8")
        return check_reload(model, written, batch)


@layers_unwarned()
def check_reload(model: PreTrainedModel, folder: str | Path, batch: Mapping[str, Tensor]) -> float:
    """Load a folder by this package, by the Auto classes of its task and as `AutoModel`, and compare the outputs."""
    if isinstance(model, TextEncoder):
        return max(check_reload(model.auto_model, folder, batch), _check_embeddings(model, folder, batch))
    worst = 0.0
    dtype, computing = model.dtype, _computing_dtype(model, batch)
    if computing != dtype:
        model = convert(model, dtype=computing)
    saved = saved_state(model)
    prefix = "" if model.base_model is model else model.base_model_prefix + "."
    task_output = first_output(model, batch)
    # The Auto classes run the code in a slim folder, which is the file that this package wrote there, and no other.
    remote = {"trust_remote_code": is_slim(model)}
    ways: list[tuple[str, Any, dict[str, Any], str, nn.Module, Tensor]] = [
        ("hies_export.load", find_model_class(folder), {}, "", model, task_output),
    ]
    of_base: dict[str, Tensor] = {}
    if has_auto_base(model):
        base, of_base = model.base_model, _for_base_model(model, batch)
        ways.append(("AutoModel", AutoModel, remote, prefix, base, first_output(base, of_base)))
    for name in auto_classes(type(model).__name__, model.config.model_type):
        if name != "AutoModel":
            ways.append((name, getattr(transformers, name), remote, "", model, task_output))
    for way, loader, options, under, original, expected in ways:
        must = f"a saved model must load again, but through {way} it failed with"
        with refusing(must, "nothing was kept", ReloadMismatchError):
            loaded, info = loader.from_pretrained(folder, dtype=dtype, output_loading_info=True, **options)
        missing = sorted(under + key for key in info["missing_keys"] if under + key in saved)
        if missing or info["mismatched_keys"]:
            raise ReloadMismatchError(
                f"every saved weight must load again, but through {way} {missing or info['mismatched_keys']} did not; "
                "nothing was kept"
            )
        inputs = of_base if way == "AutoModel" else batch
        loaded = loaded.to(model.device) if computing == dtype else loaded.to(model.device, computing)
        with refusing(
            f"a saved model must run again, but through {way} it failed with", "nothing was kept", ReloadMismatchError
        ):
            difference = Difference.of(first_output(loaded, inputs), expected)
        if not difference.within(SAME_CODE) and computing in HALF:
            # Rounding errors of products there are at least as large.
            one, other = (first_output(convert(m, dtype=torch.float32), inputs) for m in (loaded, original))
            difference = Difference.of(one, other)
        del loaded  # before the next one is loaded
        worst = max(worst, difference.max_abs)
        if not difference.within(SAME_CODE):
            raise ReloadMismatchError(
                f"a loaded model must give the saved model's output to {SAME_CODE:g} of the largest, but through {way} "
                f"it differs by {difference}; nothing was kept. No file holds hooks, mixed precision and the like of a "
                "model in memory: take them off before you prune it"
            )
    return worst


def _for_base_model(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that a model of a task gives its base model: some reshape the batch, or make more of it."""
    base: nn.Module = model.base_model
    names = [*inspect.signature(base.forward).parameters]
    given: dict[str, Tensor] = {}

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed = {**dict(zip(names, args, strict=False)), **kwargs}
        given.update({name: value for name, value in passed.items() if isinstance(value, Tensor)})

    with base.register_forward_pre_hook(record, with_kwargs=True):
        first_output(model, batch)
    if given:
        return given
    # The head calls parts of its base model, as T5's does, which makes the decoder's tokens of the text.
    needs = model.config.is_encoder_decoder and "decoder_input_ids" in names and "input_ids" in batch
    return {"decoder_input_ids": batch["input_ids"], **batch} if needs else dict(batch)


def _check_embeddings(model: TextEncoder, folder: str | Path, batch: Mapping[str, Tensor]) -> float:
    """Load a folder with its readout, and compare the embeddings of texts in float32."""
    loaded: Any = load_sentence(folder, dtype=torch.float32)
    loaded.to(model.device)
    with evaluating(model), exact_products(), torch.inference_mode():
        inputs = {name: tensor.to(model.device) for name, tensor in inputs_of(batch).items()}
        one, other = (m(**inputs).sentence_embedding for m in (convert(model, dtype=torch.float32), loaded))
    difference = Difference.of(other, one)
    if not difference.within(SAME_CODE):
        raise ReloadMismatchError(
            f"a loaded model must give the saved model's embeddings, but they differ by {difference}; nothing was kept"
        )
    return difference.max_abs


def _computing_dtype(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> torch.dtype:
    """Return the dtype to compare outputs in: the model's own, or float32 if it cannot compute in its own.

    CPUs lack some operations in half precision, and activations of a model that was trained in bfloat16 may be too
    large for float16. Neither is a fault of the files.
    """
    if model.dtype not in HALF:
        return model.dtype
    try:
        finite = bool(first_output(model, batch).isfinite().all())
    except RuntimeError as error:
        if isinstance(error, torch.OutOfMemoryError):
            raise
        finite = False
    return model.dtype if finite else torch.float32
