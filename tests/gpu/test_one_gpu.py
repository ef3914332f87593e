"""Everything that runs in torch, on a pretend GPU: the same numbers as on the CPU, and no mixing of devices."""

import copy
from collections.abc import Callable, Iterator
from itertools import chain, cycle
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from support.generative import padded, with_images
from support.models import bert, causal_lm, llava, opt, shake, text_batch, zero_padding
from support.pretend import Gpus, PretendTensor, pretend_gpus
from support.tolerance import REFITTED, assert_near
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hies_export import CRITERIA, PrunableModule, load, load_runtime, prune, prune_units, score_units
from hies_export.calibrate.moments import Moments
from hies_export.calibrate.readings import LayerEffects
from hies_export.calibrate.statistics import collect_statistics
from hies_export.checkpoint.load import load_dense
from hies_export.data.batches import first_output
from hies_export.errors import DataError, RequestError
from hies_export.evaluate.predict import predict
from hies_export.forms.form import Form
from hies_export.forms.time import time
from hies_export.kinds import ATTENTION, BOTH
from hies_export.model.copies import convert, parameter_bytes
from hies_export.score.compensated import removal_chain
from hies_export.score.criteria import needs_of
from hies_export.slim.check import compare_cut
from hies_export.units.find import find_modules

REFIT = {"method": "least_squares"}
pytestmark = pytest.mark.filterwarnings("ignore:.*calibration tokens are too few")

Batch = dict[str, Tensor]
# How to make a model, and a batch for it.
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], Batch]]] = {
    "decoder, padded left": (causal_lm, lambda: padded([9, 4, 6], "left")),
    "images and text": (llava, lambda: with_images(padded([9, 6], "left", answers=[2, 5]))),
    "flattened tokens": (lambda: shake(opt()), lambda: zero_padding(text_batch(4, 12))),
}


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with pretend_gpus() as found:
        yield found


def on_gpu(model: PreTrainedModel) -> PreTrainedModel:
    moved: Any = copy.deepcopy(model)
    return moved.to("cuda")


# Where a model is whose blocks compute on the GPU.
PLACES: dict[str, Callable[[PreTrainedModel], PreTrainedModel]] = {"on it": on_gpu, "on the CPU": copy.deepcopy}


@pytest.mark.parametrize(("name", "place"), [*zip(MODELS, cycle(PLACES), strict=False)])
def test_every_criterion_scores_as_on_the_cpu(name: str, place: str) -> None:
    make_model, make_batch = MODELS[name]
    model, batch, needs = make_model(), make_batch(), needs_of(*CRITERIA)
    modules = find_modules(model, batch, kinds=BOTH)
    wanted = collect_statistics(model, [batch], modules, needs=needs)
    with pretend_gpus() as gpus:
        moved = PLACES[place](model)
        assert find_modules(moved, batch, kinds=BOTH) == modules
        found = collect_statistics(moved, [batch], modules, needs=needs)
        assert gpus.peak[0] > 0
    for criterion in CRITERIA.values():
        of_kind = [module.name for module in modules if module.kind in criterion.kinds]
        scores = [score_units(one.of(of_kind), criterion=criterion.name, alpha=0.5).scores for one in (found, wanted)]
        assert list(scores[0]) == of_kind
        assert_near(*scores, where=criterion.name)
    assert not any(isinstance(value, PretendTensor) for one in found.values.values() for value in one.values())


OPTIONS: dict[str, dict[str, Any]] = {
    "both kinds, tokens weighted": {
        **{"criterion": "compensated", "modules": BOTH, "budget": {"parameters": 0.8}},
        "compensation": {**REFIT, "token_weights": 0.5},
    },
    "criterion on held-out rows": {"criterion": "auto", "budget": {"heads": 0.5}, "compensation": {"method": "bias"}},
    "refitted in order": {
        **{"criterion": "his", "budget": {"heads": 0.5}, "compensation": {**REFIT, "sequential": True}},
    },
}


@pytest.mark.parametrize(
    ("how", "place"), [*zip(OPTIONS, cycle(PLACES), strict=False), ("refitted in order", "on the CPU")]
)
def test_a_model_is_cut_refitted_judged_and_saved_as_on_the_cpu(how: str, place: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, batches = bert(num_hidden_layers=2, hidden_size=32, num_attention_heads=4), [text_batch() for _ in range(3)]
    wanted = prune(model, batches, **copy.deepcopy(OPTIONS[how]))
    predicted = predict(wanted.model, batches).values
    with pretend_gpus() as gpus:
        moved = PLACES[place](model)
        found = prune(moved, batches, **copy.deepcopy(OPTIONS[how]))
        assert gpus.peak[0] > 0
        assert found.model.device == moved.device
        assert found.plan.kept == wanted.plan.kept
        assert found.held_out is not None
        assert found.held_out.stability == wanted.held_out.stability  # type: ignore[union-attr]
        assert_near(predict(found.model, batches).values, predicted, within=REFITTED)
        found.save_pretrained(tmp_path / "slim")
    assert_near(predict(load(tmp_path / "slim"), batches).values, predicted, within=REFITTED)


def test_a_model_that_does_not_fit_goes_there_one_block_at_a_time(tmp_path: Path) -> None:
    model = causal_lm(num_hidden_layers=8, hidden_size=512, intermediate_size=24, head_dim=8)
    model.save_pretrained(tmp_path)
    size, block = parameter_bytes(model), parameter_bytes(model.model.layers[0])
    batches = [padded([9, 4, 6], "left") for _ in range(2)]
    options: dict[str, Any] = {"budget": {"parameters": 0.9}, "modules": BOTH, "compensation": REFIT, "held_out": []}
    wanted = prune(model, batches, **copy.deepcopy(options))
    with pretend_gpus(memory_bytes=3 * size) as gpus:
        loaded = load_dense(tmp_path, type(model))
        assert (loaded.device.type, gpus.held[0] >= size) == ("cuda", True)
    with pretend_gpus(memory_bytes=2 * size) as gpus:
        loaded = load_dense(tmp_path, type(model))
        assert loaded.device.type == "cpu"
        assert gpus.peak == [0]
        found = prune(loaded, batches, **copy.deepcopy(options))
        assert block < gpus.peak[0] < size * 3 // 4
        assert gpus.held == [0], "nothing stays there"
    assert found.plan.kept == wanted.plan.kept
    outputs = [predict(one.model, batches).values for one in (found, wanted)]
    assert_near(*outputs, within=REFITTED)


def test_a_model_on_several_devices_is_refused(gpus: Gpus) -> None:
    model = causal_lm()
    model.lm_head.to("cuda:0")
    with pytest.raises(RequestError, match="must be on one device, but its weights are on cpu and cuda:0; load it"):
        find_modules(model, padded([9], "left"))


def test_half_precision(gpus: Gpus) -> None:
    model, batches = convert(causal_lm(), dtype=torch.float16), [padded([9, 4, 6], "left")]
    result = prune(on_gpu(model), batches, budget={"heads": 0.5}, held_out=[])
    assert (result.model.dtype, result.model.device.type, result.plan.removed) == (torch.float16, "cuda", 4)


def test_layers_share_the_bias_of_a_padded_batch() -> None:
    model = causal_lm(num_hidden_layers=4, num_attention_heads=8, max_position_embeddings=128)
    length = 121
    batch = padded([length, length // 2], "left")
    modules = find_modules(model, batch)

    def peak(batch: Batch) -> int:
        with pretend_gpus() as gpus:
            collect_statistics(on_gpu(model), [batch], modules)
            return gpus.peak[0]

    whole = {**batch, "attention_mask": torch.ones_like(batch["attention_mask"])}
    mask = 2 * length * 128 * 4  # (batch, 1, queries, keys rounded up) float32; times the heads for every layer, once
    assert peak(batch) - peak(whole) < 2 * mask


def test_heads_of_a_width_that_the_fused_kernel_refuses(gpus: Gpus) -> None:
    model, batch = causal_lm(head_dim=6), padded([9, 4], "left")
    modules = find_modules(model, batch)
    found, wanted = (collect_statistics(m, [batch], modules) for m in (on_gpu(model), model))
    assert_near(dict(found.values), dict(wanted.values))


def test_the_check_of_a_cut_holds_one_block_in_float64(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = causal_lm(hidden_size=128, intermediate_size=512, num_hidden_layers=3)
    model, batch = on_gpu(wide), padded([9], "left")
    modules = find_modules(model, batch, kinds=BOTH)
    kept = {module.name: module.kept(range(2) if module.kind == ATTENTION else range(0, 512, 3)) for module in modules}
    slim = prune_units(model, kept, modules)
    before = gpus.held[0]
    monkeypatch.setattr("hies_export.slim.check.SURE_IN_FLOAT32", 0.0)  # so that rounding is looked into
    torch.cuda.reset_peak_memory_stats()
    assert compare_cut(model, slim, kept, modules, batch) < 1e-4
    in_float64 = 2 * sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    assert in_float64 <= gpus.peak[0] - before < 1.25 * in_float64


@pytest.fixture
def in_tf32() -> Iterator[None]:
    matmul = torch.backends.cuda.matmul
    before, matmul.fp32_precision = matmul.fp32_precision, "tf32"
    yield
    matmul.fp32_precision = before


@pytest.mark.usefixtures("in_tf32", "gpus")
def test_checks_multiply_in_float32() -> None:
    model, batch = bert(num_hidden_layers=1), text_batch()
    seen = []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.cuda.matmul.fp32_precision))
    first_output(model, batch)
    model(**batch)
    assert seen == ["ieee", "tf32"]


@pytest.mark.usefixtures("in_tf32")
def test_sums_and_orders_multiply_in_float32() -> None:
    seen = []

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm_.default):
                seen.append(torch.backends.cuda.matmul.fp32_precision)
            return func(*args, **(kwargs or {}))

    x = torch.randn(20, 512)
    neurons = PrunableModule(name="mlp", kind="mlp", units=512, unit_width=1, consumer="mlp.down")
    with Products():
        Moments.zeros(512, x.device, 3).add(x, x[:, :3])
        of_sums = len(seen)
        removal_chain(LayerEffects(x, x, torch.arange(20), centred=False), neurons, 20)
    assert 0 < of_sums < len(seen)
    assert set(seen) == {"ieee"}
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_devices_that_nothing_was_tried_on_are_refused() -> None:
    model = causal_lm()
    elsewhere = mock.PropertyMock(return_value=torch.device("mps"))
    with mock.patch.object(type(model.lm_head.weight), "device", elsewhere, create=True):
        for use in (lambda: find_modules(model, padded([5], "left")), lambda: load_runtime("torch", model)):
            with pytest.raises(RequestError, match="on the CPU or on a GPU of CUDA or ROCm, but .* is on mps"):
                use()


def test_a_forward_pass_and_a_decode_step_are_timed(gpus: Gpus) -> None:
    model, batch = on_gpu(causal_lm()), padded([9, 9], "left")
    found = time([Form(name, "torch", model) for name in ("dense", "slim")], {(2, 9): [batch]}, repeats=2, decode=True)
    assert [[one.phase for one in times] for times in found] == [["prefill", "decode"]] * 2
    for one in chain(*found):
        assert one.provider == "cuda:pretend"
        assert one.slim_ms > 0
    assert gpus.synchronised > 0
    with pytest.raises(DataError, match="at least one batch"):
        predict(model, [])


def test_a_compiled_model_says_what_was_captured(gpus: Gpus, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch gives up CUDA graphs with a note in its counters."""
    model, batch = on_gpu(bert(num_hidden_layers=1)), text_batch(labels=False)
    skips = torch._dynamo.utils.counters["inductor"]
    monkeypatch.setattr(torch, "compile", lambda model, **_: model)
    captured = load_runtime("torch-compile", model)
    for _ in range(2):
        captured.run(captured.prepare(batch))
    assert captured.cuda_graph

    def skipped(**inputs: Tensor) -> Any:
        skips["cudagraph_skips"] += 1
        return model(**inputs)

    monkeypatch.setitem(skips, "cudagraph_skips", 0)
    monkeypatch.setattr(torch, "compile", lambda model, **_: skipped)
    given_up = load_runtime("torch-compile", model)
    given_up.run(given_up.prepare(batch))
    assert not given_up.cuda_graph
    assert captured.cuda_graph
