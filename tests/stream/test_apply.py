"""Cutting on disk against loading, cutting and saving, byte for byte; and the checkpoints that are refused."""

import inspect
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from support.checkpoints import MODELS, batch_for, digests
from support.cuts import random_neurons, random_plan
from support.families import SMALL, architecture, decoder
from support.models import bert, save_text_model, text_batch
from support.runs import hies
from support.tolerance import assert_near, assert_same_plan
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.checkpoint.loading import load
from hies_export.checkpoint.settings import complete_settings
from hies_export.checkpoint.tensors import read_blocks, read_header, read_tensor
from hies_export.errors import OutputExistsError, PlanError, RequestError, StepError
from hies_export.kinds import ATTENTION, KINDS, MLP
from hies_export.model.tokens import synthetic_batch
from hies_export.prunable.attention import find_attention
from hies_export.prunable.find import find_modules
from hies_export.slim.check import first_output
from hies_export.slim.config import is_slim
from hies_export.slim.cut import prune_units
from hies_export.slim.fingerprint import fingerprint
from hies_export.stream.apply import MAX_SHARD_SIZE, Applied, apply_plan
from hies_export.stream.shards import ShardWriter
from hies_export.units import Kept
from hies_export.values import PruningPlan


def in_memory(
    source: Path,
    target: Path,
    plan: PruningPlan | None = None,
    *,
    kinds: Sequence[str] = (ATTENTION,),
    uniform: bool = False,
    **options: Any,
) -> PruningPlan:
    """Load, cut and save a checkpoint; return the plan."""
    model = load(source)
    modules = find_modules(model, batch_for(model), kinds=kinds)
    if kinds == (ATTENTION,):
        plan = plan or random_plan(modules, uniform=uniform)
    else:
        plan = PruningPlan("random", kept=random_neurons(modules, uniform=uniform))
    slim = prune_units(model, plan, modules)
    slim.save_pretrained(target, **options)
    complete_settings(slim, target)
    return plan


def cut_both_ways(folder: Path, **options: Any) -> tuple[PruningPlan, Applied]:
    """Cut folder/dense in memory and on disk, and compare the files of both, byte for byte."""
    plan = in_memory(folder / "dense", folder / "memory", **options)
    applied = apply_plan(plan, folder / "dense", folder / "disk")
    assert digests(folder / "disk") == digests(folder / "memory")
    return plan, applied


PLAIN = ("bert", "llama bfloat16, tied", "vit, older names", "gpt2, transposed", "phi3, fused", "llava, both towers")


@pytest.mark.parametrize("uniform", [False, True], ids=["uneven", "uniform"])
@pytest.mark.parametrize(
    ("name", "kinds"),
    [*((name, (ATTENTION,)) for name in MODELS), *itertools.product(PLAIN, ((MLP,), KINDS))],
    ids=lambda value: value if isinstance(value, str) else "+".join(value),
)
def test_the_files_are_those_of_the_model_in_memory(
    name: str, kinds: tuple[str, ...], uniform: bool, tmp_path: Path
) -> None:
    MODELS[name]().save_pretrained(tmp_path / "dense")
    plan, applied = cut_both_ways(tmp_path, kinds=kinds, uniform=uniform)
    assert PruningPlan.from_file(tmp_path / "disk" / "hies_plan.json") == plan

    one, other = load(tmp_path / "disk"), load(tmp_path / "memory")
    batch = batch_for(one)
    again = find_modules(one, batch, kinds=kinds)
    assert [(m.name, m.units) for m in again] == [(name, len(kept.units)) for name, kept in plan.kept.items()]
    assert_near(first_output(one.float(), batch), first_output(other.float(), batch))
    header = sum(8 + int.from_bytes(p.read_bytes()[:8], "little") for p in (tmp_path / "disk").glob("*.safetensors"))
    assert applied.slim_bytes + header == sum(p.stat().st_size for p in (tmp_path / "disk").glob("*.safetensors"))
    assert applied.slim_bytes < applied.dense_bytes


@pytest.mark.parametrize("name", ["llama groups", "gpt2, transposed", "mixtral, merged experts"])
def test_many_blocks_of_a_tensor(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    MODELS[name]().save_pretrained(tmp_path / "dense")
    monkeypatch.setattr("hies_export.checkpoint.tensors.BLOCK_BYTES", 1000)
    cut_both_ways(tmp_path)


@pytest.mark.parametrize("name", ["llama groups", "vit, older names", "mixtral, merged experts"])
def test_shards_in_and_out(name: str, tmp_path: Path) -> None:
    MODELS[name]().save_pretrained(tmp_path / "dense", max_shard_size="30KB")
    assert len(list((tmp_path / "dense").glob("*.safetensors"))) > 2
    plan, _ = cut_both_ways(tmp_path, uniform="mixtral" in name)
    # The merged experts of a layer are larger than the smaller limit, and each alone is not.
    for size in ("20KB", "7KB"):
        in_memory(tmp_path / "dense", tmp_path / f"memory {size}", plan, max_shard_size=size)
        apply_plan(plan, tmp_path / "dense", tmp_path / f"disk {size}", max_shard_size=size)
        assert len(digests(tmp_path / f"disk {size}")) > 4
        assert digests(tmp_path / f"disk {size}") == digests(tmp_path / f"memory {size}")


def test_shards_are_as_large_as_those_of_transformers() -> None:
    parameters = inspect.signature(PreTrainedModel.save_pretrained).parameters
    assert parameters["max_shard_size"].default == MAX_SHARD_SIZE


@pytest.mark.parametrize("kind", KINDS)
def test_rows_and_columns_by_hand(kind: str, tmp_path: Path) -> None:
    """Keep two of three groups of two heads, eight wide, or four of 64 neurons, in the middle layer of three."""
    decoder("Phi3")().save_pretrained(tmp_path / "dense")
    neurons = [0, 5, 6, 63]
    if kind == MLP:
        all_of, some, block = Kept(tuple(range(64)), 64, kind=MLP), Kept(tuple(neurons), 64, kind=MLP), "mlp"
        produced, consumed = {"gate_up_proj": [*neurons, *(64 + n for n in neurons)]}, {"down_proj": neurons}
    else:
        all_of, some, block = Kept(tuple(range(6)), 6, 3), Kept((0, 1, 4, 5), 6, 3), "self_attn"
        # Rows of six queries, three keys and three values.
        heads, consumed_heads = (0, 1, 4, 5, 6, 8, 9, 11), (0, 1, 4, 5)
        produced = {"qkv_proj": [head * 8 + i for head in heads for i in range(8)]}
        consumed = {"o_proj": [head * 8 + i for head in consumed_heads for i in range(8)]}
    kept = {f"model.layers.{i}.{block}": some if i == 1 else all_of for i in range(3)}
    apply_plan(PruningPlan("by hand", kept=kept), tmp_path / "dense", tmp_path / "slim")
    dense, slim = (load_file(tmp_path / n / "model.safetensors") for n in ("dense", "slim"))
    assert list(dense) == list(slim)
    for name, tensor in dense.items():
        layer = name.split(".")[-2] if "layers.1." in name else ""
        expected = tensor[produced[layer]] if layer in produced else tensor
        expected = tensor[:, consumed[layer]] if layer in consumed else expected
        assert torch.equal(slim[name], expected)


@pytest.mark.parametrize("same", [True, False])
def test_both_of_two_tied_weights_in_the_file(same: bool, tmp_path: Path) -> None:
    dense = decoder("Llama", tie_word_embeddings=True)()
    dense.save_pretrained(tmp_path / "dense")
    state = load_file(tmp_path / "dense" / "model.safetensors")
    embedding = state["model.embed_tokens.weight"]
    state["lm_head.weight"] = embedding.clone() if same else embedding + 1
    save_file(state, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    cut_both_ways(tmp_path)
    assert ("lm_head.weight" in load_file(tmp_path / "disk" / "model.safetensors")) is not same


def test_the_dtype_of_the_config_counts(tmp_path: Path) -> None:
    decoder("Llama")().save_pretrained(tmp_path / "dense")
    change_config(tmp_path / "dense", dtype="bfloat16")
    cut_both_ways(tmp_path)
    assert {t.dtype for t in load_file(tmp_path / "disk" / "model.safetensors").values()} == {torch.bfloat16}


def test_names_of_old_checkpoints_and_tensors_that_are_not_needed(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "dense")
    state = load_file(tmp_path / "dense" / "model.safetensors")
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    state = {next((n.replace(a, b) for a, b in old.items() if a in n), n): t for n, t in state.items()}
    state["bert.embeddings.position_ids"] = torch.arange(64)
    save_file(state, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    cut_both_ways(tmp_path)


def test_a_slim_checkpoint_is_cut_again(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "dense")
    first = in_memory(tmp_path / "dense", tmp_path / "once")
    assert is_slim(load(tmp_path / "once"))
    apply_plan(first, tmp_path / "dense", tmp_path / "once on disk")
    second = in_memory(tmp_path / "once", tmp_path / "memory")
    apply_plan(second, tmp_path / "once on disk", tmp_path / "disk")
    assert digests(tmp_path / "disk") == digests(tmp_path / "memory")


def test_the_tokenizer_comes_along_and_the_card_stays(tmp_path: Path) -> None:
    dense = save_text_model(tmp_path / "dense")
    (dense / "README.md").write_text("about the dense model")
    apply_plan(plan_for(dense), dense, tmp_path / "disk")
    assert (tmp_path / "disk" / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    assert not (tmp_path / "disk" / "README.md").exists()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "disk")
    assert tokenizer("good bad")["input_ids"] == [2, 5, 6, 3]


# A process of its own, as the peak of this one would count.
CHILD = """
import sys
from hies_export import PruningPlan, apply_plan
apply_plan(PruningPlan.from_file(sys.argv[1]), sys.argv[2], sys.argv[3])
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_does_not_follow_the_size(tmp_path: Path) -> None:
    """The checkpoint has 600 MB, which is more than the bound of 500 MB and 1.5 times the largest tensor."""
    options = {"hidden_size": 1024, "intermediate_size": 6144, "num_attention_heads": 8, "num_key_value_heads": 4}
    config = transformers.LlamaConfig(**(SMALL | options | {"num_hidden_layers": 7}))
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "dense", state_dict={})
    state = {name: torch.ones(t.shape) for name, t in model.state_dict().items()}
    save_file(state, tmp_path / "dense" / "model.safetensors", metadata={"format": "pt"})
    largest, total = max(t.nbytes for t in state.values()), sum(t.nbytes for t in state.values())
    bound = 1.5 * largest + 500e6
    assert total > 1.1 * bound
    plan = random_plan(find_attention(model, synthetic_batch(model, batch=2, sequence=8)), uniform=False)
    (tmp_path / "plan.json").write_text(plan.to_json())
    command = [sys.executable, "-c", CHILD, *(str(tmp_path / n) for n in ("plan.json", "dense", "slim"))]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert int(output.split()[-1]) * 1024 < bound


def test_the_command_with_a_model_of_the_hub(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the Hub's cache as a download leaves it, the command takes an id and needs no network."""
    snapshot = tmp_path / "home" / "hub" / "models--someone--tiny" / "snapshots" / "abc"
    decoder("Llama")().save_pretrained(snapshot, max_shard_size="30KB")
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("abc")
    plan = in_memory(snapshot, tmp_path / "memory")
    (tmp_path / "plan.json").write_text(plan.to_json())
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    assert constants.HF_HUB_OFFLINE
    assert hies("apply", tmp_path / "plan.json", "someone/tiny", "-o", tmp_path / "slim", "--json") == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["heads"] == {"total": 18, "removed": plan.removed}
    assert result["bytes"]["slim"] < result["bytes"]["dense"]
    assert result["seconds"] > 0
    assert digests(tmp_path / "slim") == digests(tmp_path / "memory")


# What can be wrong. Nothing may be left behind.


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PruningPlan]:
    """A checkpoint in shards, and a plan for it."""
    folder = tmp_path_factory.mktemp("made")
    decoder("Llama")().save_pretrained(folder, max_shard_size="30KB")
    return folder, plan_for(folder)


@pytest.fixture
def plan(made: tuple[Path, PruningPlan]) -> PruningPlan:
    return made[1]


@pytest.fixture
def dense(made: tuple[Path, PruningPlan], tmp_path: Path) -> Path:
    return shutil.copytree(made[0], tmp_path / "dense")


def plan_for(folder: Path) -> PruningPlan:
    model = load(folder)
    return random_plan(find_attention(model, batch_for(model)), uniform=False)


def change_config(folder: Path, **values: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


NORM = "model.norm.weight"


def spoil(folder: Path, what: str) -> None:
    index = folder / "model.safetensors.index.json"
    listed = json.loads(index.read_text())
    second, with_norm = sorted(folder.glob("*.safetensors"))[1], folder / listed["weight_map"][NORM]
    state = load_file(with_norm)
    if what == "a shard less":
        second.unlink()
    elif what in ("cut short", "half a header", "no safetensors"):
        content = {"cut short": second.read_bytes()[:-10], "half a header": second.read_bytes()[:100]}
        second.write_bytes(content.get(what, b"<html>not found</html>"))
    elif what == "empty index":
        index.write_text("{}")
    elif what in ("pickled", "no weights"):
        for path in folder.glob("model*"):
            path.unlink()
        if what == "pickled":
            (folder / "pytorch_model.bin").write_bytes(b"")
    elif what == "unknown dtype":
        with_norm.write_bytes(with_norm.read_bytes().replace(b'"F32"', b'"F4 "', 1))
    elif what == "quantised":
        change_config(folder, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    elif what == "no config":
        (folder / "config.json").unlink()
    else:
        norm = {NORM: torch.ones(5)} if what == "another shape" else {}
        save_file({n: t for n, t in state.items() if n != NORM} | norm, with_norm, metadata={"format": "pt"})
        if what == "a tensor and its entry less":
            del listed["weight_map"][NORM]
            index.write_text(json.dumps(listed))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a shard less", r"shards are named in .*, but 1 of them are missing: 'model-00002-of"),
        ("cut short", r"must have the \d+ bytes that its header describes, but has \d+; it is cut short"),
        ("half a header", "must be a safetensors file, but .* is not: its header is longer"),
        ("no safetensors", "must be a safetensors file, but .* is not: its header is longer"),
        ("empty index", "the index of a sharded checkpoint must name the file of every .* weight_map is missing"),
        ("pickled", r"must have model.safetensors .* has pytorch_model.bin; convert it once"),
        ("no weights", "has no weights; convert it once"),
        ("a tensor less", f"1 are not where it says: '{NORM}'"),
        ("a tensor and its entry less", f"1 are not so: {NORM}: absent. A part that was never trained"),
        ("another shape", rf"1 are not so: {NORM}: \(5,\), not \(48,\)"),
        ("quantised", "is quantised; dequantise it first"),
        ("unknown dtype", "but 'model.*' .*F4"),
        ("no config", "must be a folder with a config.json or a Hub id"),
    ],
)
def test_bad_checkpoints_are_refused(what: str, message: str, plan: PruningPlan, dense: Path, tmp_path: Path) -> None:
    spoil(dense, what)
    with pytest.raises(RequestError, match=message):
        apply_plan(plan, dense, tmp_path / "slim")
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


def test_a_plan_for_another_model(dense: Path, tmp_path: Path) -> None:
    decoder("Llama", num_key_value_heads=6)().save_pretrained(tmp_path / "other")
    with pytest.raises(PlanError, match="the plan is for 6 query and 6 key/value heads"):
        apply_plan(plan_for(tmp_path / "other"), dense, tmp_path / "slim")
    assert not (tmp_path / "slim").exists()


def test_a_plan_for_other_weights(plan: PruningPlan, dense: Path, tmp_path: Path) -> None:
    model = load(dense)
    plan = replace(plan, model=fingerprint(model, find_attention(model, batch_for(model))))
    apply_plan(plan, dense, tmp_path / "slim")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "half")
    apply_plan(plan, tmp_path / "half", tmp_path / "half slim")
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(1.01)
    model.save_pretrained(tmp_path / "other")
    with pytest.raises(PlanError, match="those of model.layers.0.self_attn.o_proj differ from"):
        apply_plan(plan, tmp_path / "other", tmp_path / "nothing")
    assert not (tmp_path / "nothing").exists()
    apply_plan(plan, tmp_path / "other", tmp_path / "forced", force=True)
    written = PruningPlan.from_file(tmp_path / "forced" / "hies_plan.json")
    assert_same_plan(written, replace(plan, model=fingerprint(model, find_attention(model, batch_for(model)))))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inner", [None, 48], ids=["wide", "square"])
def test_a_plan_knows_its_own_weights_where_they_are_transposed(inner: int | None, kind: str, tmp_path: Path) -> None:
    """Every layer of a GPT-2 is a Conv1D, whose weight is stored (inputs, outputs), and attention's last is square."""
    architecture("GPT2", "LMHeadModel", n_inner=inner)().save_pretrained(tmp_path / "dense")
    model = load(tmp_path / "dense")
    modules = find_modules(model, batch_for(model), kinds=(kind,))
    made = PruningPlan("random", kept=random_neurons(modules, uniform=False), model=fingerprint(model, modules))
    (tmp_path / "plan.json").write_text(made.to_json())
    plan = PruningPlan.from_file(tmp_path / "plan.json")
    assert plan.model.keys() == {name for module in (modules[0], modules[-1]) for name in module.layers}
    prune_units(model, plan, modules).save_pretrained(tmp_path / "memory")
    apply_plan(plan, tmp_path / "dense", tmp_path / "disk")
    assert digests(tmp_path / "disk") == digests(tmp_path / "memory")
    apply_plan(plan, tmp_path / "dense", tmp_path / "forced", force=True)
    assert_same_plan(PruningPlan.from_file(tmp_path / "forced" / "hies_plan.json"), plan)
    # The same numbers in another order are other weights, which their norm would not tell.
    name = modules[-1].consumer
    with torch.no_grad():
        weight = model.get_submodule(name).weight
        weight.copy_(weight.T.reshape(weight.shape).clone())
    model.save_pretrained(tmp_path / "other")
    for refused in (
        lambda: prune_units(model, plan, modules),
        lambda: apply_plan(plan, tmp_path / "other", tmp_path / "nothing"),
    ):
        with pytest.raises(PlanError, match=f"those of {name} differ from"):
            refused()


def test_a_model_that_is_nowhere(plan: PruningPlan, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="must be on this machine, on the Hub or .* but someone/nothing is not here"):
        apply_plan(plan, "someone/nothing", tmp_path / "slim")


def test_an_existing_folder(plan: PruningPlan, dense: Path, tmp_path: Path) -> None:
    (tmp_path / "slim").mkdir()
    (tmp_path / "slim" / "mine").touch()
    for overwrite in (False, True):
        with pytest.raises(OutputExistsError, match="overwrite=True"):
            apply_plan(plan, dense, tmp_path / "slim", overwrite=overwrite)
    assert [p.name for p in (tmp_path / "slim").iterdir()] == ["mine"]
    (tmp_path / "slim" / "mine").unlink()
    for _ in range(2):
        apply_plan(plan, dense, tmp_path / "slim", overwrite=True)
    first_output(load(tmp_path / "slim"), text_batch(labels=False))


class Watcher:
    """Progress that acts at the sixth tensor."""

    def __init__(self, act: Callable[[], None]):
        self.act = act

    def stage(self, name: str) -> None:
        pass

    def track(self, items: Sequence[Any], name: str) -> Iterable[Any]:
        for position, item in enumerate(items):
            if position == 5:
                self.act()
            yield item


@pytest.mark.parametrize(
    ("shrinks", "error", "match"),
    [(False, KeyboardInterrupt, "at the sixth"), (True, StepError, "ended too early; was it changed during the cut")],
)
def test_stopped_in_the_middle(
    shrinks: bool, error: type[BaseException], match: str, plan: PruningPlan, dense: Path, tmp_path: Path
) -> None:
    def act() -> None:
        if not shrinks:
            raise KeyboardInterrupt("at the sixth")
        for shard in dense.glob("*.safetensors"):
            os.truncate(shard, shard.stat().st_size // 2)

    with pytest.raises(error, match=match):
        apply_plan(plan, dense, tmp_path / "slim", progress=Watcher(act))
    assert [p.name for p in tmp_path.iterdir()] == ["dense"]


def test_the_layout_is_that_of_safetensors(tmp_path: Path) -> None:
    """For dtypes of every size, tensors without elements or axes, and names that JSON must escape."""
    state: Mapping[str, Tensor] = {
        "b": torch.arange(6, dtype=torch.float16).view(2, 3),
        "a": torch.arange(3, dtype=torch.uint8),
        "scalar": torch.tensor(3.0, dtype=torch.float64),
        "none": torch.empty(0, 4),
        'quote " é': torch.tensor([True, False]),
        "z": torch.arange(5),
        "bf": torch.ones(3, dtype=torch.bfloat16),
    }
    save_file(dict(state), tmp_path / "theirs", metadata={"format": "pt"})
    stored = read_header(tmp_path / "theirs")
    buffer = bytearray()
    with ShardWriter(tmp_path / "ours", {n: t.to("meta") for n, t in state.items()}) as writer:
        for name in state:
            writer.write(name, read_blocks(stored[name], {}, state[name].dtype, buffer))
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert all(torch.equal(read_tensor(stored[n], t.dtype, buffer), t) for n, t in state.items())
    shutil.rmtree(tmp_path)


def test_two_labels_with_default_names_are_written(tmp_path: Path) -> None:
    """transformers leaves them out, and BART's config has three by default."""
    architecture("Bart", num_labels=2, vocab_size=32)().save_pretrained(tmp_path / "dense")
    labels = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}}
    change_config(tmp_path / "dense", **labels)
    model = load(tmp_path / "dense")
    modules = find_attention(model, synthetic_batch(model, batch=2, sequence=8))
    apply_plan(random_plan(modules, uniform=False), tmp_path / "dense", tmp_path / "disk")
    assert load(tmp_path / "disk").config.num_labels == 2


def test_files_narrower_than_the_config_says_stay_so(tmp_path: Path) -> None:
    """Else the slim checkpoint could be larger than its source."""
    bert().half().save_pretrained(tmp_path / "dense")
    change_config(tmp_path / "dense", dtype="float32")
    modules = find_attention(load(tmp_path / "dense"), text_batch())
    applied = apply_plan(random_plan(modules, uniform=False), tmp_path / "dense", tmp_path / "disk")
    assert applied.slim_bytes < applied.dense_bytes
    assert load(tmp_path / "disk").dtype == torch.float16
