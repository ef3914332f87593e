"""Write a slim checkpoint, and check that it loads as the model that was saved."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..data.batches import first_output
from ..equal import SAME_CODE, Difference
from ..errors import PlanError, ReloadMismatchError, refusing
from ..model import internals
from ..model.copies import convert, parameter_bytes
from ..model.memory import LARGE_BYTES
from ..model.modes import evaluating
from ..model.text_encoder import TextEncoder, Unwrapped
from ..model.tokens import longest_sequence, short_samples
from ..select.fingerprint import digest_tensors
from ..select.plan import PruningPlan
from ..slim.config import is_slim
from .beside import (
    DOCUMENTS,
    PROCESSORS,
    VOCABULARIES,
    complete_settings,
    copy_companions,
    documents_of,
    label_numbers,
    write_card,
)
from .classes import config_of_class, find_model_class
from .folders import new_folder
from .weights import describe_tensors, weight_files

logger = logging.getLogger(__name__)


def save_slim(
    model: PreTrainedModel,
    folder: str | Path,
    *,
    plan: PruningPlan,
    batch: Mapping[str, Tensor],
    processor: Any = None,
    dtype: torch.dtype | None = None,
    refitted: Mapping[str, Tensor] | None = None,
    overwrite: bool = False,
) -> float:
    """Save a slim model, load it again through every class that users may load it by, and compare.

    Models in half precision are compared in float32. The folder of a `TextEncoder` is both the checkpoint of
    its encoder and a folder of sentence-transformers. A model whose parameters take more than 1 GiB is not loaded a
    second time: its files are read tensor by tensor and must hold the model's numbers, and the model that each class
    builds from the saved config must have the same names and shapes and, with the model's tensors, the same outputs in
    the model's own dtype.

    Args:
        model: The slim model.
        folder: Where to write; appears only when everything is written and checked.
        plan: Saved as `hies_plan.json`.
        batch: Inputs on which the saved and the loaded models are compared.
        processor: Tokenizer or image processor to save with the model.
        dtype: Dtype to save in; by default the model's own. The model is not changed. Parameters that transformers
            keeps in float32 stay in float32.
        refitted: Parameters that compensation changed, to write as `refit.safetensors` beside the plan; their digest
            should be the plan's.
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
        return write_slim(model, written, plan=plan, batch=batch, processor=processor, dtype=dtype, refitted=refitted)


def write_slim(
    model: PreTrainedModel,
    folder: Path,
    *,
    plan: PruningPlan,
    batch: Mapping[str, Tensor],
    given: Unwrapped | None = None,
    processor: Any = None,
    dtype: torch.dtype | None = None,
    refitted: Mapping[str, Tensor] | None = None,
) -> float:
    """Write the files of `save_slim` into an empty folder, and compare.

    `given` is what the dense model was taken from. It saves the slim model. If it has a folder, the dense model's
    vocabularies are copied from there, and without a `processor` also its processor's files. Documents such as the
    licence come from there, or by default from where the model was loaded.
    """
    if dtype is not None and dtype != model.dtype:
        model = convert(model, dtype=internals.dtypes_in(model, dtype))
    # `saved` is the model of transformers; `whole` is it or the object of sentence-transformers around it.
    if isinstance(model, TextEncoder):
        saved, whole = model.auto_model, model.wrapped(processor)
    else:
        saved, whole = model, (model if given is None else given.wrap(model, processor))
    without_card: Any = {} if whole is model else {"create_model_card": False}  # sentence-transformers writes one
    label_numbers_set = internals.attributes_set([(saved.config, "label2id", label_numbers(saved.config))])
    with internals.attention_undecided(internals.configs_of(saved)), label_numbers_set:
        whole.save_pretrained(str(folder), **without_card)
    if processor is not None and whole is model:
        processor.save_pretrained(folder)
    dense_folder = None if given is None else given.folder
    source = dense_folder or documents_of(model)
    if source is not None:
        patterns = [*DOCUMENTS]
        if dense_folder is not None and processor is None:
            patterns += PROCESSORS
        elif dense_folder is not None and not plan.vocabulary:  # else they hold tokens that were removed
            patterns += VOCABULARIES
        copy_companions(source, folder, patterns)
    complete_settings(saved, folder, source)
    (folder / "hies_plan.json").write_text(plan.to_json(), encoding="utf-8")
    if refitted is not None:
        save_file(dict(refitted), folder / REFIT)
    write_card(folder, source)
    max_abs = check_reload(saved, folder, batch)
    if whole is not model:
        check_in_sentence_transformers(whole, folder)
    return max_abs


class _Way(NamedTuple):
    """A way to load a saved folder."""

    name: str  # in messages
    loader: Any  # a model class, or an Auto class
    options: dict[str, Any]  # for its `from_pretrained`
    original: nn.Module  # what it must give back: the saved model, or its base model
    inputs: Mapping[str, Tensor]  # of `original`, to compare outputs on
    prefix: str = ""  # in front of a tensor's name in `original`, makes it that in the saved model


@internals.layers_unwarned()
def check_reload(model: PreTrainedModel, folder: str | Path, batch: Mapping[str, Tensor]) -> float:
    """Load a folder in every way that users may, one after the other; return the largest difference of an output.

    The ways are this package, the Auto classes of its task, and `AutoModel`. Models of more than `LARGE_BYTES` are
    built by `_build` in place of loaded, where that can be done. Raises the ReloadMismatchErrors of `save_slim`.
    """
    large = parameter_bytes(model) > LARGE_BYTES
    batch = short_samples(batch) if large else batch
    # Rounding in half precision would hide small differences, or look like one. A large model shares its tensors with
    # what is built, so both round alike; but its numbers may overflow.
    if model.dtype in (torch.float16, torch.bfloat16) and not (large and first_output(model, batch).isfinite().all()):
        model = convert(model, dtype=torch.float32)
    saved = internals.saved_state(model)
    stored = _compared_names(saved, Path(folder)) if large else None
    ways = [_Way("hies_export.load", find_model_class(folder), {}, model, batch)]
    # The Auto classes run the code in a slim folder, which is the file that this package wrote there, and no other.
    options = {"trust_remote_code": is_slim(model)}
    if internals.has_auto_base(model):
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        ways.append(_Way("AutoModel", AutoModel, options, model.base_model, _base_model_inputs(model, batch), prefix))
    names = internals.auto_classes(type(model).__name__, model.config.model_type)
    ways += [_Way(name, getattr(transformers, name), options, model, batch) for name in names if name != "AutoModel"]
    max_abs = 0.0
    for way in ways:
        expected = first_output(way.original, way.inputs)
        loaded = _reloaded(model, folder, way, saved, stored)
        must = f"a saved model must run again, but through {way.name} it failed with"
        with refusing(must, "nothing was kept", ReloadMismatchError):
            difference = Difference.of(first_output(loaded, way.inputs), expected)
        del loaded  # before the next one is loaded
        max_abs = max(max_abs, difference.max_abs)
        if not difference.within(SAME_CODE):
            raise ReloadMismatchError(
                f"a loaded model must give the saved model's output to {SAME_CODE:g} of the largest, but through "
                f"{way.name} it differs by {difference}; nothing was kept. No file holds hooks, mixed precision and "
                "the like of a model in memory: take them off before you prune it"
            )
    return max_abs


def _reloaded(
    model: PreTrainedModel, folder: str | Path, way: _Way, saved: Mapping[str, Tensor], stored: set[str] | None
) -> Any:
    """Load a model's folder in one way, or `_build` it if `stored` is given; refuse it if a `saved` tensor is lost."""
    must = f"a saved model must load again, but through {way.name} it failed with"
    with refusing(must, "nothing was kept", ReloadMismatchError):
        result: Any = None if stored is None else _build(way, folder, stored)
        if result is None:
            result = way.loader.from_pretrained(folder, dtype=model.dtype, output_loading_info=True, **way.options)
        loaded, info = result
    missing = sorted(way.prefix + key for key in info["missing_keys"] if way.prefix + key in saved)
    if missing or info["mismatched_keys"]:
        raise ReloadMismatchError(
            f"every saved weight must load again, but through {way.name} {missing or info['mismatched_keys']} did not; "
            "nothing was kept"
        )
    return loaded.to(model.device)


def _compared_names(saved: Mapping[str, Tensor], folder: Path) -> set[str] | None:
    """Return the names of tensors in a folder's files, None for others than saved; refuse other numbers."""
    names = set()
    for file in weight_files(folder):
        for name in [name for name, _, _ in describe_tensors(file)]:
            if name not in saved:  # transformers saves some tensors under other names
                return None
            with safe_open(file, "pt") as tensors:  # opened anew, as an open file keeps all that was read in memory
                stored = tensors.get_tensor(name).flatten()
            expected = saved[name].detach().to("cpu", stored.dtype).flatten()
            if not torch.equal(stored.view(torch.uint8), expected.view(torch.uint8)):  # bit by bit: NaN equals NaN
                raise ReloadMismatchError(
                    f"files must hold the numbers of the model, but {file.name} has others for {name}; nothing was kept"
                )
            names.add(name)
    return names


def _build(way: _Way, folder: str | Path, stored: set[str]) -> tuple[Any, dict[str, Any]] | None:
    """Build a model from a saved config, as loading would; return it, and what `output_loading_info` would report.

    It shares the tensors of the saved model, unless the files, which hold the names in `stored`, lack some or some have
    another shape. None if the model must be loaded: if its names are not those of the saved model, or if it has tensors
    that are no parameters or buffers.
    """
    if isinstance(way.loader, type) and issubclass(way.loader, PreTrainedModel):
        built = internals.empty_model(way.loader, config_of_class(way.loader, folder))
    else:
        config = AutoConfig.from_pretrained(folder, **way.options)
        with torch.device("meta"):
            built = way.loader.from_config(config, **way.options)
    originals, tensors = way.original.state_dict(), built.state_dict(keep_vars=True)
    has_others = any(isinstance(value, Tensor) for module in built.modules() for value in vars(module).values())
    if has_others or tensors.keys() != originals.keys():
        return None
    names_of = defaultdict[int, set[str]](set)  # `id` of a tensor -> its names
    for name, tensor in tensors.items():
        names_of[id(tensor)].add(way.prefix + name)  # tied ones share a tensor, which the files hold once
    missing = [name for name, tensor in tensors.items() if not names_of[id(tensor)] & stored]
    mismatched = [name for name, tensor in tensors.items() if tensor.shape != originals[name].shape]
    if not (missing or mismatched):
        internals.share_tensors(built, way.original)
    return built, {"missing_keys": missing, "mismatched_keys": mismatched}


def _base_model_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the base model gets when its model runs on a batch: heads may reshape or add inputs."""
    base: nn.Module = model.base_model
    names = [*inspect.signature(base.forward).parameters]
    recorded: dict[str, Tensor] = {}

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed = {**dict(zip(names, args, strict=False)), **kwargs}
        recorded.update({name: value for name, value in passed.items() if isinstance(value, Tensor)})

    with base.register_forward_pre_hook(record, with_kwargs=True):
        first_output(model, batch)
    return recorded or dict(batch)  # nothing was recorded if the model calls only submodules of its base model


@internals.layers_unwarned()
@internals.never_asking()
def check_in_sentence_transformers(whole: Any, folder: Path, *, limit: float = SAME_CODE) -> None:
    """Compare an object of sentence-transformers with the one that it loads from the object's folder.

    A few texts, one of them too long for most models, go through `encode_query`, `encode_document` and
    `encode` of both, or through `predict` of a CrossEncoder. This package saved the folder, so its code may run. Raises
    ReloadMismatchError if it does not load, or if a number differs by more than `limit`, a share of the largest.
    """
    must = "a saved model must load again, but in sentence-transformers"
    with refusing(f"{must} it fails with", "nothing was kept", ReloadMismatchError):
        options: dict[str, Any] = {"device": str(whole.device), "local_files_only": True, "trust_remote_code": True}
        computing = {"dtype": torch.float32, "attn_implementation": "eager"}
        loaded = type(whole)(str(folder), **options, model_kwargs=computing)
        saved, texts = convert(whole, dtype=torch.float32), _sample_texts(whole)
        with evaluating(saved), internals.exact_products():
            actual = torch.cat(_embeddings_or_scores(loaded, texts))
            expected = torch.cat(_embeddings_or_scores(saved, texts))
    difference = Difference.of(actual, expected)
    if not difference.within(limit):
        raise ReloadMismatchError(f"{must} it differs by {difference}; nothing was kept")


def _embeddings_or_scores(model: Any, texts: list[str]) -> list[Tensor]:
    """Return the embeddings that a SentenceTransformer gives for texts, or a CrossEncoder's scores of pairs of them."""
    # One at a time: with padding on the left, some models embed a text by the others of its batch.
    options: dict[str, Any] = {"batch_size": 1, "convert_to_tensor": True, "show_progress_bar": False}
    if hasattr(model, "predict"):
        return [model.predict([*zip(texts, reversed(texts), strict=True)], **options, activation_fn=nn.Identity())]
    return [encode(texts, **options) for encode in (model.encode_query, model.encode_document, model.encode)]


def _sample_texts(whole: Any) -> list[str]:
    """Return a few texts for an object of sentence-transformers, the last one longer than most models take."""
    texts = ["two words", "A Question, and its Answer: 42?"]
    longest = longest_sequence(whole[0].config)
    # Where a folder asks for longer texts than its model takes, sentence-transformers fails on these.
    if longest is None or (whole.max_seq_length or 0) <= longest:
        texts.append("many words " * 300)
    return texts


REFIT = "refit.safetensors"  # the layers that a compensated run refitted, beside its plan
_ADVICE = f"give the {REFIT} that was written with the plan, or cut without it: --no-refit (in Python refit=None)"


def refit_beside(plan: PruningPlan, file: Path) -> Path | None:
    """Return the file of refitted layers beside the file of a plan; None if there is none, or the plan names none."""
    beside = file.parent / REFIT
    return beside if plan.refit is not None and beside.is_file() else None


def read_refit(plan: PruningPlan, file: Path) -> dict[str, Tensor]:
    """Return a plan's refitted parameters by name, after checking that the plan was written with this file."""
    if plan.refit is None:
        raise PlanError(
            f"refitted layers must be those of the plan, but this plan names none, got {file}; leave out "
            "--refit (in Python refit=None), or give the plan that was written with them"
        )
    with refusing(f"refitted layers must be a safetensors file, but {file} is none", _ADVICE, PlanError):
        tensors: dict[str, Tensor] = load_file(file)
    digest = digest_tensors(tensors)
    if digest != plan.refit:
        raise PlanError(
            f"refitted layers must be those of the plan, whose digest is {plan.refit[:12]}, but that of {file} is "
            f"{digest[:12]}; {_ADVICE}"
        )
    return tensors


def load_refit(model: PreTrainedModel, refitted: Mapping[str, Tensor]) -> None:
    """Copy refitted parameters into a slim model, in place; if one does not fit, raise a `PlanError` and copy none."""
    state = model.state_dict()
    for name, tensor in refitted.items():
        if name not in state or tensor.shape != state[name].shape:
            has = f"{list(state[name].shape)} there" if name in state else "no such parameter"
            raise PlanError(
                f"refitted layers must fit the model that the plan leaves, but {name} is {list(tensor.shape)}, and the "
                f"model has {has}; {_ADVICE}"
            )
    with torch.no_grad():
        for name, tensor in refitted.items():
            model.get_parameter_or_buffer(name).copy_(tensor)


def warn_uncompensated(plan: PruningPlan) -> None:
    """Warn that a model is cut by a compensated model's plan but not compensated."""
    remedy = ""
    if plan.refit is not None:
        remedy = f"give the {REFIT} of the run that made the plan as --refit (in Python refit=), or "
    logger.warning(
        "the plan was made for a model that is refitted after the cut (compensation: %s), but its layers are NOT "
        "refitted here, so quality is that of cutting alone; %srefit anew in Python, by prune(model, batches, "
        "plan=PLAN, compensation=...)",
        plan.compensation.get("method"),
        remedy,
    )
