from functools import partial

import numpy as np
import onnx
import pytest
import torch
from support.exported import wide_bert
from support.models import causal_lm
from transformers import BertConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput

from hies_export import (
    DataError,
    ExportError,
    MissingRuntimeError,
    RecipeError,
    RequestError,
    export_onnx,
    load_runtime,
)
from hies_export.forms.onnx import export as export_module
from hies_export.forms.runtimes import ort as ort_module
from hies_export.forms.runtimes.base import RUNTIMES, split_last_token
from hies_export.forms.runtimes.pytorch import TorchRuntime
from hies_export.model.copies import share_weights
from hies_export.model.tokens import positions_of

# logits = 2 * input_ids + attention_mask - token_type_ids, so every input can be seen in the output.
GRAPH = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[b, s] input_ids, int64[b, s] attention_mask, int64[b, s] token_type_ids) => (float[b, s] logits) {
  twice = Add(input_ids, input_ids)
  masked = Add(twice, attention_mask)
  typed = Sub(masked, token_type_ids)
  logits = Cast<to=1>(typed)
}"""


def skip_without(name):
    try:
        RUNTIMES[name].require()
    except MissingRuntimeError as error:
        pytest.skip(str(error))


@pytest.fixture
def folder(tmp_path):
    onnx.save(onnx.parser.parse_model(GRAPH), tmp_path / "model.onnx")
    return tmp_path


@pytest.fixture
def model():
    return wide_bert()


IDS = torch.tensor([[1, 2, 3], [4, 5, 6]])


def test_torch_runs_in_evaluation_mode_and_leaves_the_model_in_training(model):
    runtime = load_runtime("torch", model.train())
    batch = {"input_ids": IDS, "labels": torch.tensor([0, 1]), "text": ["a", "b"]}
    feed = runtime.prepare(batch)
    assert list(feed) == ["input_ids"]
    output = runtime.run(feed)
    assert not output.logits.requires_grad
    assert model.training
    with torch.no_grad():
        want = model.eval()(input_ids=IDS).logits.numpy()
    # Dropout is the model's default of 0.1: training mode would show.
    np.testing.assert_array_equal(runtime.fetch(output)["logits"], want)
    assert (runtime.name, runtime.provider, runtime.threads) == ("torch", "cpu", torch.get_num_threads())
    assert not runtime.decodes


def test_torch_pins_its_threads_only_while_it_runs(model):
    before, seen = torch.get_num_threads(), []
    runtime = load_runtime("torch", model, threads=before + 1)
    runtime._model.register_forward_pre_hook(lambda *args: seen.append(torch.get_num_threads()))
    runtime.run(runtime.prepare({"input_ids": IDS}))
    assert seen == [before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.parametrize("name", ["", "model.onnx"])
def test_onnxruntime_runs_a_folder_or_a_file_and_feeds_keep_their_own_values(folder, name):
    runtime = load_runtime("onnxruntime-cpu", folder / name, threads=1)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    whole = {"input_ids": IDS, "attention_mask": mask, "token_type_ids": IDS, "labels": IDS}
    # Without a mask it is of ones, and types are zeros.
    feeds = [runtime.prepare(batch) for batch in (whole, {"input_ids": IDS[:1].to(torch.int32) * 10})]
    got = [runtime.fetch(runtime.run(feed))["logits"] for feed in (*feeds, feeds[0])]
    for found, want in zip(got, (IDS + mask, IDS[:1] * 20 + 1, IDS + mask), strict=True):
        np.testing.assert_array_equal(found, want.numpy())
    assert (runtime.provider, runtime.threads, runtime.decodes) == ("CPUExecutionProvider", 1, False)
    with pytest.raises(DataError, match="input 'input_ids' must be in the batch, which has pixel_values"):
        runtime.prepare({"pixel_values": IDS})


def test_onnxruntime_does_not_spin_and_takes_the_threads(folder, monkeypatch):
    import onnxruntime

    seen = []

    class Session(onnxruntime.InferenceSession):
        def __init__(self, file, options, **settings):
            seen.append(options)
            super().__init__(file, options, **settings)

    monkeypatch.setattr(onnxruntime, "InferenceSession", Session)
    load_runtime("onnxruntime-cpu", folder, threads=3)
    assert seen[0].get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert (seen[0].intra_op_num_threads, seen[0].inter_op_num_threads) == (3, 1)


def test_wrong_requests(folder, model):
    for error, said, name, source, options in (
        (RequestError, r"one of .*torch, .*got 'onnx-cpu'; did you mean 'onnxruntime-cpu'", "onnx-cpu", folder, {}),
        (RecipeError, "threads must be at least 1, got 0", "torch", model, {"threads": 0}),
        (RecipeError, "needs a PreTrainedModel, got PosixPath", "torch", folder, {}),
        (RecipeError, "needs an ONNX file or folder, got BertFor", "onnxruntime-cpu", model, {}),
        (RecipeError, r"nothing\.onnx does not exist", "onnxruntime-cpu", folder / "nothing.onnx", {}),
    ):
        with pytest.raises(error, match=said):
            load_runtime(name, source, **options)


def test_a_copy_that_shares_weights_shares_nothing_else(model):
    model.encode = model.config  # an attribute that both must not share
    copied = share_weights(model.train())
    assert [id(p) for p in copied.parameters()] == [id(p) for p in model.parameters()]
    copied.eval().set_attn_implementation("eager")
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    empty = share_weights(model, device="meta")
    assert {p.device.type for p in empty.parameters()} == {"meta"}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert [p.shape for p in empty.parameters()] == [p.shape for p in model.parameters()]


# logits = input_ids + position_ids, and a cache that stays as it is.
CACHED = """<ir_version: 10, opset_import: ["" : 20]>
g (int64[b, s] input_ids, int64[b, t] attention_mask, int64[b, s] position_ids,
   float[b, 2, p, 4] "past_key_values.0.key") => (int64[b, s] logits, float[b, 2, p, 4] "present.0.key") {
  logits = Add(input_ids, position_ids)
  "present.0.key" = Identity("past_key_values.0.key")
}"""


def test_onnxruntime_fills_in_positions_and_an_empty_cache(tmp_path):
    onnx.save(onnx.parser.parse_model(CACHED), tmp_path / "model.onnx")
    runtime = load_runtime("onnxruntime-cpu", tmp_path)
    mask = torch.tensor([[0, 1, 1], [1, 1, 1]])
    result = runtime.run(runtime.prepare({"input_ids": IDS, "attention_mask": mask}))
    assert runtime.fetch(result)["logits"].tolist() == [[1, 2, 4], [4, 6, 8]]
    assert runtime.fetch(result)["present.0.key"].shape == (2, 2, 0, 4)
    # A step: the last token's position counts what is in the cache, which goes in as it came out.
    cache = {"past_key_values.0.key": runtime.values(result)["present.0.key"]}
    step = runtime.prepare({"input_ids": IDS[:, :1], "attention_mask": mask, **cache})
    assert runtime.fetch(runtime.run(step))["logits"].tolist() == [[2], [6]]


@pytest.fixture
def decoder():
    return causal_lm(num_hidden_layers=1)


@pytest.mark.parametrize("name", ["torch", "onnxruntime-cpu", "openvino"])
def test_the_step_of_the_last_token_is_what_the_whole_prompt_ends_in(name, decoder, tmp_path):
    skip_without(name)
    ids = torch.randint(5, 30, (2, 9))
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    source = decoder if name == "torch" else export_onnx(decoder, tmp_path / "onnx", batch=batch).folder
    runtime = load_runtime(name, source)
    assert runtime.decodes
    assert runtime.dtype == "float32"
    with torch.no_grad():
        whole = decoder(**batch, position_ids=positions_of(mask)).logits
    real = mask.bool().numpy()
    np.testing.assert_allclose(runtime.compute(batch)["logits"][real], whole.numpy()[real], atol=2e-4)
    feed = runtime.prepare_step(batch)
    # The cache of a feed does not grow, however often it is run.
    for _ in range(3):
        assert runtime.time_ns(feed) > 0
        got = runtime.fetch(runtime.run(feed))
        np.testing.assert_allclose(got["logits"][:, -1], whole[:, -1].numpy(), atol=2e-4)
        assert got["logits"].shape[1] == 1
        assert got["present.0.key"].shape[2] == 9


def test_a_model_may_call_its_cache_as_before_transformers_5_24(decoder):
    """As the code does that travels with older checkpoints."""
    ids = torch.randint(5, 30, (2, 9))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    wanted = decoder(**batch).logits[:, -1].detach()

    class Older(type(decoder)):
        def forward(self, input_ids=None, attention_mask=None, past_key_values=None, use_cache=None):
            return super().forward(input_ids, attention_mask, cache=past_key_values, use_cache=use_cache)

    decoder.__class__ = Older
    runtime = TorchRuntime(decoder, threads=1)
    assert runtime.decodes
    got = runtime.fetch(runtime.run(runtime.prepare_step(batch)))
    np.testing.assert_allclose(got["logits"][:, -1], wanted.numpy(), atol=2e-4)
    assert got["present.0.key"].shape[2] == 9


def test_the_prompt_and_the_step_of_a_batch():
    batch = {"input_ids": IDS, "mm_token_type_ids": IDS + 1, "pixel_values": torch.ones(2, 3, 4, 4)}
    prompt, step = split_last_token(batch)
    assert {name: value.tolist() for name, value in prompt.items() if name != "pixel_values"} == {
        "input_ids": [[1, 2], [4, 5]],
        "mm_token_type_ids": [[2, 3], [5, 6]],
        "attention_mask": [[1, 1], [1, 1]],
    }
    assert {name: value.tolist() for name, value in step.items()} == {
        "input_ids": [[3], [6]],
        "mm_token_type_ids": [[4], [7]],
        "attention_mask": [[1, 1, 1], [1, 1, 1]],
    }
    assert prompt["pixel_values"] is batch["pixel_values"]


@pytest.fixture(scope="module")
def exports(tmp_path_factory):
    """Of `model`, which is the same in every test: one for each provider."""
    return tmp_path_factory.mktemp("exports")


class Embedding(PreTrainedModel):
    """A model that is compiled in a moment."""

    config_class = BertConfig

    def __init__(self, width):
        super().__init__(BertConfig(hidden_size=width, num_attention_heads=1))
        self.table = torch.nn.Embedding(20, width)
        self.post_init()

    def forward(self, input_ids=None, return_dict=None):
        return SequenceClassifierOutput(logits=self.table(input_ids).cumsum(-1))


# Of the largest logit.
TOLERANCE = {"onnxruntime-cpu-int8": 0.1}


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch imports it itself
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name == "torch-compile" else ())
        for name, runtime in RUNTIMES.items()
        if runtime.format != "gguf"  # decoders alone, and probabilities alone: tests/gguf_export/test_llamacpp.py
    ],
)
def test_every_runtime_computes_what_torch_does(model, exports, name):
    skip_without(name)
    batch, source = {"input_ids": IDS, "attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, model.eval()
    if name == "torch-compile":
        batch, source = {"input_ids": IDS}, Embedding(16).eval()
    with torch.no_grad():
        want = source(**batch).logits.numpy()
    if not RUNTIMES[name].reads_models:
        source = exports / RUNTIMES[name].fused_for
        if not source.exists():
            export_onnx(model, source, batch=batch, provider=RUNTIMES[name].fused_for)
    runtime = load_runtime(name, source, threads=1)
    got = runtime.fetch(runtime.run(runtime.prepare(batch)))["logits"]
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE.get(name, 1e-5) * max(1, np.abs(want).max()))
    assert (runtime.dtype, runtime.threads) == ("float32", 1)


def test_compiled_torch_compiles_every_shape(monkeypatch):
    """torch would stop after eight, count those of all models, and run the others eagerly."""
    from torch._dynamo.testing import CompileCounter

    compiled = CompileCounter()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=compiled))
    for width in (16, 24):
        runtime = load_runtime("torch-compile", Embedding(width))
        for length in range(2, 8):
            runtime.run(runtime.prepare({"input_ids": torch.ones(2, length, dtype=torch.int64)}))
    assert compiled.frame_count == 12


def test_compiled_torch_shares_a_program_among_many_shapes(monkeypatch):
    """Of what is run once, and of any shape after the first ones."""
    from torch._dynamo.testing import CompileCounter

    from hies_export.forms.runtimes import pytorch

    made = []

    def recorded(compiled, *, dynamic, mode=None):
        counter = CompileCounter()
        made.append((dynamic, counter))
        return compile_(compiled, backend=counter, dynamic=dynamic)

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", recorded)
    monkeypatch.setattr(pytorch, "MOST_SHAPES", 2)
    model = Embedding(16)
    runtime = load_runtime("torch-compile", model)
    # None as long as there are rows: a program of such a shape assumes that both are always equal.
    batches = [{"input_ids": torch.ones(2, length, dtype=torch.int64)} for length in range(3, 9)]
    for batch in batches[:3]:
        runtime.compute(batch)
    assert [(dynamic, counter.frame_count) for dynamic, counter in made] == [(False, 0), (True, 1)]
    for batch in batches:
        got = runtime.fetch(runtime.run(runtime.prepare(batch)))["logits"]
        with torch.no_grad():
            np.testing.assert_allclose(got, model.eval()(**batch).logits.numpy(), atol=1e-5)
    assert [(dynamic, counter.frame_count) for dynamic, counter in made] == [(False, 2), (True, 1)]


def test_what_torch_cannot_compile_is_refused(monkeypatch):
    def broken(graph, inputs):
        raise ValueError("no such operator")

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=broken))
    runtime = load_runtime("torch-compile", Embedding(16))
    batch = {"input_ids": torch.ones(2, 9, dtype=torch.int64)}
    for use in (runtime.compute, lambda batch: runtime.run(runtime.prepare(batch))):
        with pytest.raises(ExportError, match=r"'torch-compile' must compile the model, and torch refused: .*"):
            use(batch)


def test_compiled_torch_needs_a_compiler(model, monkeypatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(MissingRuntimeError, match=r"needs a C\+\+ compiler on the CPU, and found none"):
        load_runtime("torch-compile", model)


def test_sessions_of_large_graphs_share_an_arena_and_compute_the_same(model, tmp_path, monkeypatch):
    """The weights of a session in the shared arena are not freed with those of another one."""
    monkeypatch.setattr(export_module, "INSIDE_BYTES", 0)  # the weights are in a file of their own
    export_onnx(model, tmp_path / "large", batch={"input_ids": IDS})
    usual = load_runtime("onnxruntime-cpu", tmp_path / "large").compute({"input_ids": IDS})
    shared = []
    monkeypatch.setattr(ort_module, "LARGE_BYTES", 0)
    monkeypatch.setattr(ort_module, "_share_arena", lambda share=ort_module._share_arena: shared.append(share()))
    first, second = (load_runtime("onnxruntime-cpu", tmp_path / "large") for _ in range(2))
    assert len(shared) == 2
    first.compute({"input_ids": IDS})
    del first
    for name, found in second.compute({"input_ids": IDS}).items():
        np.testing.assert_array_equal(found, usual[name])


def test_a_feed_whose_outputs_were_dropped_holds_none_and_runs_again(folder):
    runtime = load_runtime("onnxruntime-cpu", folder)
    feed = runtime.prepare({"input_ids": IDS})
    expected = runtime.fetch(runtime.run(feed))["logits"]
    runtime.drop_outputs(feed)
    assert not any(value.has_value() for value in feed.binding.get_outputs())
    np.testing.assert_array_equal(runtime.fetch(runtime.run(feed))["logits"], expected)
