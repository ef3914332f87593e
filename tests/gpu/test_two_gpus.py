"""Models that accelerate spread over two pretend GPUs: found, scored, cut, refitted, measured, copied and exported."""

import copy
import re
from collections.abc import Iterator
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from support.generative import padded
from support.models import bert, causal_lm, llama, text_batch, zero_padding
from support.on_gpus import BOTH, SHARED_MODELS, Makers, found_alike
from support.pretend import Gpus, pretend_gpus
from support.tolerance import REFITTED, assert_near
from torch import nn
from transformers import PreTrainedModel

from hies_export import export_gguf, load_runtime, prune
from hies_export.calibrate.statistics import collect_statistics
from hies_export.data.batches import inputs_of
from hies_export.evaluate.predict import predict
from hies_export.forms.measure.counts import cache_bytes_per_token, count_flops
from hies_export.forms.measure.shapes import model_shapes
from hies_export.forms.onnx import export
from hies_export.model.copies import convert, parameter_bytes, share_weights

accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")

pytestmark = pytest.mark.filterwarnings("ignore:.*calibration tokens are too few")

# Parts beyond the layers, which come last.
LAST = ("classifier", "score", "lm_head", "pooler", "norm.", "layernorm.", "multi_modal_projector")


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with pretend_gpus(2) as found:
        yield found


def spread(model: PreTrainedModel) -> PreTrainedModel:
    """Return a copy with every other layer, and all that follows the layers, on the second GPU."""
    places = {}
    for name, _ in model.named_parameters():
        layer = re.match(r"(.*?layers?\.(\d+))\.", name)
        if layer:
            places[layer[1]] = f"cuda:{int(layer[2]) % 2}"
        else:
            places[name.rpartition(".")[0]] = f"cuda:{int(name.startswith(LAST) or '.norm.' in name)}"
    spread: PreTrainedModel = accelerate.dispatch_model(copy.deepcopy(model), places, main_device="cuda:0")
    return spread


MODELS: dict[str, Makers] = {
    **SHARED_MODELS,
    "classifier": (bert, text_batch),
    "classifier of a decoder": (llama, lambda: zero_padding(text_batch(4, 10))),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_spread_model_is_scored_and_measured_as_a_whole_one(gpus: Gpus, name: str) -> None:
    model, parts, batch, modules = found_alike(MODELS[name], spread)
    assert min(gpus.held) > 0
    found, wanted = (collect_statistics(m, [batch], modules, needs=("his", "entropy")) for m in (parts, model))
    assert_near(dict(found.values), dict(wanted.values))
    unlabelled = [inputs_of(batch)]
    assert_near(*(collect_statistics(m, unlabelled, modules)["his"] for m in (parts, model)))
    assert count_flops(parts, batch) == count_flops(model, batch)
    assert cache_bytes_per_token(parts) == cache_bytes_per_token(model)
    shapes = () if "pixel_values" not in batch or "input_ids" in batch else ((1,),)
    assert model_shapes(parts, shapes) == model_shapes(model, shapes)


def test_a_spread_model_is_cut_refitted_and_timed(gpus: Gpus) -> None:
    make_model, make_batch = MODELS["decoder, padded left"]
    model, batches = make_model(), [make_batch() for _ in range(3)]
    options: dict[str, Any] = {"criterion": "compensated", "budget": {"parameters": 0.8}, "modules": BOTH}
    options["compensation"] = {"method": "least_squares"}
    found, wanted = (prune(m, batches, **copy.deepcopy(options)) for m in (spread(model), model))
    assert found.plan.kept == wanted.plan.kept
    assert {parameter.device.index for parameter in found.model.parameters()} == {0, 1}
    outputs = [m(**inputs_of(batches[0])).logits.cpu() for m in (found.model, wanted.model)]
    assert_near(*outputs, within=REFITTED)
    assert predict(found.model, batches) is not None
    runtime = load_runtime("torch", found.model)
    feed = runtime.prepare(batches[0])
    assert runtime.time_ns(feed) > 0
    peak = runtime.peak_memory_bytes(feed)
    assert peak is not None
    assert peak > parameter_bytes(found.model)


def test_copies_elsewhere_are_in_one_place(gpus: Gpus) -> None:
    model, batch = causal_lm(), inputs_of(padded([9, 4, 6], "left"))
    parts = spread(model)
    whole = convert(parts, dtype=torch.float32, device="cpu")
    for copied in (whole, export._float32_copy(parts)):  # the second is what ONNX graphs are traced from
        assert_near(copied(**batch).logits, model(**batch).logits)
    assert not any(hasattr(module, "_hf_hook") for module in whole.modules())
    assert whole.to("cuda").device.type == "cuda", "no warning that a spread model should not be moved"
    ids = batch["input_ids"].to("meta")
    assert share_weights(parts, device="meta")(input_ids=ids).logits.is_meta
    # The model itself stays spread, and so does a copy in place.
    assert_near(share_weights(parts)(**batch).logits.cpu(), model(**batch).logits)
    assert_near(parts(**batch).logits.cpu(), model(**batch).logits)


def test_somebody_s_own_forward_stays(gpus: Gpus) -> None:
    layer = nn.Linear(4, 4)
    layer.forward = MethodType(lambda self, x: 2 * nn.functional.linear(x, self.weight), layer)  # type: ignore
    x = torch.randn(2, 4)
    wanted = layer(x)
    accelerate.hooks.attach_align_device_hook(layer, execution_device="cuda:1")
    assert torch.equal(convert(layer, device="cpu")(x), wanted)


def test_a_spread_decoder_is_exported_to_gguf(gpus: Gpus, tmp_path: Path) -> None:
    pytest.importorskip("gguf", reason="gguf is not installed")
    from support.gguf import llama as of_llama
    from support.gguf import sentence_piece_tokenizer

    model, tokenizer = of_llama(num_hidden_layers=2), sentence_piece_tokenizer()
    files = [
        export_gguf(m, tmp_path / name, tokenizer=tokenizer).file for name, m in (("a", spread(model)), ("b", model))
    ]
    assert files[0].read_bytes() == files[1].read_bytes()
