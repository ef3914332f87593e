"""Write a slim checkpoint, and check that it loads as the model that was saved."""

from __future__ import annotations

import inspect
import logging
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedModel

from ..equal import SAME_CODE, Difference
from ..errors import PlanError, ReloadMismatchError, refusing
from ..model.copies import convert, parameter_bytes
from ..model.internals import (
    attention_undecided,
    attributes_set,
    auto_classes,
    configs_of,
    dtypes_in,
    empty_model,
    exact_products,
    has_auto_base,
    layers_unwarned,
    never_asking,
    saved_state,
    share_tensors,
)
from ..model.memory import LARGE_BYTES
from ..model.modes import evaluating
from ..model.text_encoder import TextEncoder, Unwrapped
from ..model.tokens import longest_sequence, short_samples
from ..select.fingerprint import digest_tensors
from ..select.plan import PruningPlan
from ..slim.check import first_output
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
        model = convert(model, dtype=dtypes_in(model, dtype))
    if isinstance(model, TextEncoder):
        saved, whole = model.auto_model, model.wrapped(processor)
    else:
        saved, whole = model, (model if given is None else given.wrap(model, processor))
    without_card: Any = {} if whole is model else {"create_model_card": False}
    both_ways = attributes_set([(saved.config, "label2id", label_numbers(saved.config))])
    with attention_undecided(configs_of(saved)), both_ways:
        whole.save_pretrained(str(folder), **without_card)
    if processor is not None and whole is model:
        processor.save_pretrained(folder)
    dense = None if given is None else given.folder
    source = dense or documents_of(model)
    if source is not None:
        # If tokens were removed, the dense model's vocabularies no longer fit.
        of_processor = () if plan.vocabulary else VOCABULARIES
        of_tokenizer = () if dense is None else of_processor if processor is not None else PROCESSORS
        copy_companions(source, folder, (*of_tokenizer, *DOCUMENTS))
    complete_settings(saved, folder, source)
    (folder / "hies_plan.json").write_text(plan.to_json(), encoding="utf-8")
    if refitted is not None:
        save_file(dict(refitted), folder / REFIT)
    write_card(folder, None, source)
    worst = check_reload(saved, folder, batch)
    if whole is not model:
        check_in_sentence_transformers(whole, folder)
    return worst


@layers_unwarned()
def check_reload(model: PreTrainedModel, folder: str | Path, batch: Mapping[str, Tensor]) -> float:
    """Load a folder in every way that users may, one after the other; return the largest difference of an output.

    The ways are this package, the Auto classes of its task, and `AutoModel`. Models of more than `LARGE_BYTES` are
    `_built` and not loaded. Raises the ReloadMismatchErrors of `save_slim`.
    """
    large = parameter_bytes(model) > LARGE_BYTES
    batch = short_samples(batch) if large else batch
    worst = 0.0
    # Rounding in half precision would hide small differences, or look like one. A large model shares its tensors with
    # what is built, so both round alike; but its numbers may overflow.
    if model.dtype in (torch.float16, torch.bfloat16) and not (large and first_output(model, batch).isfinite().all()):
        model = convert(model, dtype=torch.float32)
    saved = saved_state(model)
    held = _names_held(saved, Path(folder)) if large else None
    own_class: Any = find_model_class(folder)
    ways: list[tuple[str, Any, nn.Module, Mapping[str, Tensor]]] = [("hies_export.load", own_class, model, batch)]
    if has_auto_base(model):
        ways.append(("AutoModel", AutoModel, model.base_model, _base_model_inputs(model, batch)))
    names = auto_classes(type(model).__name__, model.config.model_type)
    ways += [(name, getattr(transformers, name), model, batch) for name in names if name != "AutoModel"]
    for way, loader, original, inputs in ways:
        expected = first_output(original, inputs)
        under = "" if original is model else f"{model.base_model_prefix}."
        # The Auto classes run the code in a slim folder, which is the file that this package wrote there, and no other.
        options = {} if loader is own_class else {"trust_remote_code": is_slim(model)}
        must = f"a saved model must load again, but through {way} it failed with"
        with refusing(must, "nothing was kept", ReloadMismatchError):
            loaded: Any
            loaded, info = _built(loader, folder, original, under, held, options) or loader.from_pretrained(
                folder, dtype=model.dtype, output_loading_info=True, **options
            )
        missing = sorted(under + key for key in info["missing_keys"] if under + key in saved)
        if missing or info["mismatched_keys"]:
            raise ReloadMismatchError(
                f"every saved weight must load again, but through {way} {missing or info['mismatched_keys']} did not; "
                "nothing was kept"
            )
        loaded = loaded.to(model.device)
        with refusing(
            f"a saved model must run again, but through {way} it failed with", "nothing was kept", ReloadMismatchError
        ):
            difference = Difference.of(first_output(loaded, inputs), expected)
        del loaded  # before the next one is loaded
        worst = max(worst, difference.max_abs)
        if not difference.within(SAME_CODE):
            raise ReloadMismatchError(
                f"a loaded model must give the saved model's output to {SAME_CODE:g} of the largest, but through {way} "
                f"it differs by {difference}; nothing was kept. No file holds hooks, mixed precision and the like of a "
                "model in memory: take them off before you prune it"
            )
    return worst


def _names_held(saved: Mapping[str, Tensor], folder: Path) -> set[str] | None:
    """Return the names of the tensors in a folder's files; refuse one whose numbers are not those of the model.

    None if a name is not in the model, because transformers saves some tensors under other names.
    """
    names = set()
    for file in weight_files(folder):
        for name in [n for n, *_ in describe_tensors(file)]:
            if name not in saved:
                return None
            with safe_open(file, "pt") as tensors:  # opened anew, as an open file keeps all that was read in memory
                stored = tensors.get_tensor(name).flatten()
            wanted = saved[name].detach().to("cpu", stored.dtype).flatten()
            if not torch.equal(stored.view(torch.uint8), wanted.view(torch.uint8)):
                raise ReloadMismatchError(
                    f"files must hold the numbers of the model, but {file.name} has others for {name}; nothing was kept"
                )
            names.add(name)
    return names


def _built(
    loader: Any, folder: str | Path, original: nn.Module, under: str, held: set[str] | None, options: Any
) -> tuple[Any, dict[str, Any]] | None:
    """Build a model from a saved config, as loading would; return it, and what loading would report.

    It shares the tensors of the saved model, `original`, unless some are missing or of another shape. `loader` is a
    class or an Auto class, `held` the names in the files, and `under` their prefix. None if the model must be loaded:
    if `held` is None, if its names are not the original's, or if it has tensors that are no parameters or buffers.
    """
    if held is None:
        return None
    if isinstance(loader, type) and issubclass(loader, PreTrainedModel):
        built = empty_model(loader, config_of_class(loader, folder))
    else:
        config = AutoConfig.from_pretrained(folder, **options)
        with torch.device("meta"):
            built = loader.from_config(config, **options)
    wanted, of_class = original.state_dict(), built.state_dict(keep_vars=True)
    kept_aside = any(isinstance(value, Tensor) for module in built.modules() for value in vars(module).values())
    if kept_aside or of_class.keys() != wanted.keys():
        return None
    names_of = defaultdict[int, set[str]](set)
    for name, tensor in of_class.items():
        names_of[id(tensor)].add(under + name)  # tied ones share a tensor, which the files hold once
    missing = [name for name, tensor in of_class.items() if not names_of[id(tensor)] & held]
    mismatched = [name for name, tensor in of_class.items() if tensor.shape != wanted[name].shape]
    if not (missing or mismatched):
        share_tensors(built, original)
    return built, {"missing_keys": missing, "mismatched_keys": mismatched}


def _base_model_inputs(model: PreTrainedModel, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors that the base model gets when its model runs on a batch: heads may reshape or add inputs."""
    base: nn.Module = model.base_model
    names = [*inspect.signature(base.forward).parameters]
    given: dict[str, Tensor] = {}

    def record(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        passed = {**dict(zip(names, args, strict=False)), **kwargs}
        given.update({name: value for name, value in passed.items() if isinstance(value, Tensor)})

    with base.register_forward_pre_hook(record, with_kwargs=True):
        first_output(model, batch)
    return given or dict(batch)  # nothing was recorded where the model calls parts of its base model


@layers_unwarned()
@never_asking()
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
        whole, texts = convert(whole, dtype=torch.float32), _texts(whole)
        with evaluating(whole), exact_products():
            one, other = (torch.cat(_numbers(model, texts)) for model in (loaded, whole))
    difference = Difference.of(one, other)
    if not difference.within(limit):
        raise ReloadMismatchError(f"{must} it differs by {difference}; nothing was kept")


def _numbers(model: Any, texts: list[str]) -> list[Tensor]:
    """Return the embeddings that a SentenceTransformer gives for texts, or a CrossEncoder's scores of pairs of them."""
    # One at a time: with padding on the left, some models embed a text by the others of its batch.
    how: dict[str, Any] = {"batch_size": 1, "convert_to_tensor": True, "show_progress_bar": False}
    if hasattr(model, "predict"):
        return [model.predict([*zip(texts, reversed(texts), strict=True)], **how, activation_fn=nn.Identity())]
    return [encode(texts, **how) for encode in (model.encode_query, model.encode_document, model.encode)]


def _texts(whole: Any) -> list[str]:
    """Return a few texts, the last one longer than most models take."""
    texts = ["two words", "A Question, and its Answer: 42?"]
    most = longest_sequence(whole[0].config)
    # Where a folder asks for longer texts than its model takes, sentence-transformers fails on these.
    return [*texts, "many words " * 300] if most is None or (whole.max_seq_length or 0) <= most else texts


REFIT = "refit.safetensors"
_ADVICE = f"give the {REFIT} that was written with the plan, or cut without it: --no-refit (in Python refit=None)"
_CARD = """\
# Cut without its compensation

The plan of this checkpoint was made for a model whose output projections are refitted after the cut ({method}). They
were **not** refitted here: the files hold the weights of the dense model, without the units that were removed.
Measurements of the refitted model do not hold for this one.

`hies-export apply PLAN MODEL -o DIR --refit FILE` cuts and uses the refitted layers, which a compensated run writes
beside its plan as `refit.safetensors`. `prune(model, batches, plan=PLAN, compensation=...)` in Python refits them anew.
"""


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
    found = digest_tensors(tensors)
    if found != plan.refit:
        raise PlanError(
            f"refitted layers must be those of the plan, whose digest is {plan.refit[:12]}, but that of {file} is "
            f"{found[:12]}; {_ADVICE}"
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


def warn_uncompensated(plan: PruningPlan) -> str:
    """Warn that a model is cut by a compensated model's plan but not compensated; return the same as its card."""
    method = plan.compensation.get("method")
    remedy = ""
    if plan.refit is not None:
        remedy = f"give the {REFIT} of the run that made the plan as --refit (in Python refit=), or "
    logger.warning(
        "the plan was made for a model that is refitted after the cut (compensation: %s), but its layers are NOT "
        "refitted here, so quality is that of cutting alone; %srefit anew in Python, by prune(model, batches, "
        "plan=PLAN, compensation=...)",
        method,
        remedy,
    )
    return _CARD.format(method=method)
