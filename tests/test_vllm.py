"""Slim checkpoints in vLLM on the CPU: the tokens and the probabilities of torch.

`scripts/try vllm` makes the environment and runs this; `HIES_VLLM_PYTHON` names its interpreter. `HIES_VLLM_MODEL` is
the folder of a real decoder, which is cut unevenly to 0.8 of its FLOPs, and `HIES_VLLM_SLIM` a folder of it that was
cut before.
"""

import gzip
import json
import os
import statistics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import generative_tokenizer, shake
from support.tiers import run_in, table_of
from support.vllm_generate import NEW_TOKENS
from torch import Tensor
from transformers import AutoTokenizer, BertConfig, BertModel, PreTrainedModel

from hies_export import PruningPlan, find_modules, load, prune, prune_units, save_slim
from hies_export.kinds import ATTENTION, BOTH, MLP
from hies_export.slim.config import is_slim

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("HIES_VLLM_PYTHON", ROOT / ".vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no environment of vLLM: run scripts/try vllm"),
]

# Its attention on the CPU needs heads of a width of 32 or more.
SIZES = {
    **{"vocab_size": 512, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 4},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32, "max_position_embeddings": 512},
    "rope_parameters": {"rope_type": "default", "rope_theta": 50_000.0},
}
LLAMA3 = {
    **{"rope_type": "llama3", "rope_theta": 500_000.0, "factor": 8.0, "original_max_position_embeddings": 64},
    **{"low_freq_factor": 1.0, "high_freq_factor": 4.0},
}
TOLERANCE = 1e-4  # of a probability, in float32
# vLLM's own classes read their config; these are transformers' classes, and with the code of the folder.
BY_TRANSFORMERS = {"model_impl": "transformers"}
WITH_CODE = {**BY_TRANSFORMERS, "trust_remote_code": True}


@dataclass(frozen=True)
class Case:
    """A cut and how vLLM is asked to run it."""

    family: str  # of the dense model
    groups: tuple[int, ...] | None  # of heads kept in each layer, of 4; None for all
    neurons: tuple[int, ...] | None  # kept in each layer, of 688; None for all
    written: str  # model type of the slim checkpoint
    options: dict[str, Any] = field(default_factory=dict)  # of `vllm.LLM`
    fields: dict[str, Any] = field(default_factory=dict)  # of the dense config; those that are None are left out


EVEN, UNEVEN, GROUPS = (512,) * 4, (300, 337, 411, 640), (4, 2, 3, 1)
CASES = {
    "uniform, as mistral": Case("Llama", (3,) * 4, EVEN, "mistral"),
    "uniform, RoPE llama3": Case("Llama", (2,) * 4, EVEN, "llama", fields={"rope_parameters": LLAMA3}),
    "uniform, two processes": Case("Llama", (2,) * 4, EVEN, "llama", {"tensor_parallel_size": 2}),
    "uniform, norms of queries and keys": Case("Qwen3", (3,) * 4, EVEN, "qwen3"),
    "uniform neurons": Case("Qwen2", None, EVEN, "qwen2"),
    "uniform heads and neurons": Case("Qwen2", (3,) * 4, EVEN, "qwen2", BY_TRANSFORMERS),
    "uneven neurons": Case("Llama", None, UNEVEN, "llama", WITH_CODE),
    "uneven neurons, biases": Case("Qwen2", None, UNEVEN, "qwen2", WITH_CODE),
    "uniform heads, uneven neurons": Case("Qwen3", (2,) * 4, UNEVEN, "qwen3", WITH_CODE),
    "uniform heads, uneven neurons, as mistral": Case("Llama", (3,) * 4, UNEVEN, "mistral", WITH_CODE),
    "uneven heads": Case("Llama", GROUPS, None, "llama", WITH_CODE),
    "uneven heads and neurons": Case("Llama", GROUPS, UNEVEN, "llama", WITH_CODE),
    "uneven heads and neurons, norms of queries and keys": Case("Qwen3", GROUPS, UNEVEN, "qwen3", WITH_CODE),
    "uneven heads and neurons, biases": Case("Qwen2", GROUPS, UNEVEN, "qwen2", WITH_CODE, {"head_dim": None}),
}
PROMPTS, PROMPT_TOKENS, TIMES = 20, 32, 5


table = table_of("HIES_VLLM_TABLE", "family", "cut", "written as", "vLLM's options", "tokens", "probabilities differ")
speeds = table_of("HIES_VLLM_SPEEDS", "model", "tokens", "probabilities differ", "tokens a second")


@pytest.mark.parametrize("name", CASES)
def test_vllm_continues_as_torch_does(name: str, table: list[Any], tmp_path: Path) -> None:
    case = CASES[name]
    stock = getattr(transformers, f"{case.family}ForCausalLM")
    sizes = {name: value for name, value in {**SIZES, **case.fields}.items() if value is not None}
    dense = shake(stock(stock.config_class(**sizes)))
    prompts = torch.randint(5, SIZES["vocab_size"], (2, 24))
    slim = cut_and_saved(dense, {"input_ids": prompts}, case.groups, case.neurons, tmp_path / "slim")
    assert (slim.config.model_type, is_slim(slim)) == (case.written, "trust_remote_code" in case.options)

    answers, _ = vllm(tmp_path / "slim", prompts, case.options, tmp_path)
    equal, difference = compared(slim, prompts, answers)
    options = ", ".join(f"{key}={value}" for key, value in case.options.items()) or "none"
    tokens = f"{equal} of {len(prompts) * NEW_TOKENS} equal"
    table.append((case.family, name, case.written, options, tokens, f"{difference:.1e}"))


@pytest.mark.parametrize(("groups", "neurons"), [(None, UNEVEN), ((6,) * 4, UNEVEN)], ids=["neurons", "equal heads"])
def test_vllm_pools_an_encoder_as_torch_does(
    groups: tuple[int, ...] | None, neurons: tuple[int, ...], tmp_path: Path
) -> None:
    sizes = {name: SIZES[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")}
    dense = shake(BertModel(BertConfig(**sizes, num_attention_heads=8)))
    tokens = torch.randint(5, SIZES["vocab_size"], (2, 24))
    batch = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    slim = cut_and_saved(dense, batch, groups, neurons, tmp_path / "slim")
    generative_tokenizer().save_pretrained(tmp_path / "slim")
    states, _ = vllm(tmp_path / "slim", tokens, {**WITH_CODE, "runner": "pooling"}, tmp_path)
    with torch.no_grad():
        expected = torch.nn.functional.normalize(slim(**batch).last_hidden_state, dim=-1)
    assert (torch.tensor(states) - expected).abs().max() < TOLERANCE


def test_vllm_runs_a_real_model_that_was_cut_unevenly(tmp_path: Path, shared: Path, speeds: list[Any]) -> None:
    if "HIES_VLLM_MODEL" not in os.environ:
        pytest.skip("no real model: HIES_VLLM_MODEL names the folder of a decoder")
    source = os.environ["HIES_VLLM_MODEL"]
    tokenizer = AutoTokenizer.from_pretrained(source)
    slim_folder = Path(os.environ.get("HIES_VLLM_SLIM", tmp_path / "slim"))
    if not slim_folder.is_dir():
        rows = blocks(tokenizer, shared, "validation")
        result = prune(
            load(source, dtype=torch.float32),
            [{"input_ids": part, "labels": part} for part in rows[:80].split(8)],
            modules=("attention", "mlp"),
            criterion="fisher",
            budget={"flops": 0.8},
            compensation={"method": "least_squares", "samples": 48},
        )
        result.save_pretrained(slim_folder)
    rows = blocks(tokenizer, shared, "test")
    prompts = rows[:: len(rows) // PROMPTS][:PROMPTS, :PROMPT_TOKENS]
    slim = load(slim_folder, dtype=torch.float32)
    counts = {tuple(sorted(fields)) for fields in slim.config.hies_export["per_layer_config"].values()}
    assert any("num_key_value_heads" in fields for fields in counts), "its heads are not uneven"

    compiled = {"enforce_eager": False} if "HIES_VLLM_COMPILE" in os.environ else {}
    for what, folder, options in (
        ("slim, transformers' classes", slim_folder, WITH_CODE),
        ("dense, transformers' classes", source, BY_TRANSFORMERS),
        ("dense, vLLM's own classes", source, {}),
    ):
        answers, seconds = vllm(folder, prompts, {**options, **compiled, "times": TIMES}, tmp_path)
        model = slim if folder is slim_folder else load(folder, dtype=torch.float32)
        equal, difference = compared(model, prompts, answers)
        tokens = len(prompts) * NEW_TOKENS
        speed = f"{tokens / statistics.median(seconds):.0f}"
        speeds.append((what, f"{equal} of {tokens} equal", f"{difference:.1e}", speed))


def cut_and_saved(
    dense: PreTrainedModel,
    batch: dict[str, Tensor],
    groups: tuple[int, ...] | None,
    neurons: tuple[int, ...] | None,
    folder: Path,
) -> PreTrainedModel:
    """Cut a model at random to these numbers of groups and neurons in its layers, None for all, and save it."""
    modules = find_modules(dense, batch, kinds=BOTH)
    kept = {}
    for kind, counts in ((ATTENTION, groups), (MLP, neurons)):
        found = [module for module in modules if module.kind == kind]
        for module, count in zip(found, counts or (found[0].groups,) * len(found), strict=True):
            stay = set(torch.randperm(module.groups)[:count].tolist())
            kept[module.name] = module.kept(u for u in range(module.units) if u // module.group_size in stay)
    plan = PruningPlan(kept={module.name: kept[module.name] for module in modules}, criterion="random")
    slim = prune_units(dense, plan, modules)
    save_slim(slim, folder, plan=plan, batch=batch)
    return slim


def vllm(source: str | Path, prompts: Tensor, options: dict[str, Any], folder: Path) -> tuple[list[Any], list[float]]:
    """Return what vLLM answers to prompts, and how many seconds each of the timed repeats took."""
    (folder / "prompts.json").write_text(json.dumps(prompts.tolist()))
    (folder / "options.json").write_text(json.dumps(options))
    run_in(PYTHON, "vllm_generate.py", source, folder)
    answers, seconds = (json.loads((folder / f"{name}.json").read_text()) for name in ("answers", "seconds"))
    return answers, seconds


def compared(model: PreTrainedModel, prompts: Tensor, answers: list[Any]) -> tuple[int, float]:
    """Compare what vLLM wrote with torch's greedy tokens and probabilities.

    Returns:
        How many tokens are those that torch ranks first, and the largest difference of a probability.
    """
    new = torch.tensor([answer["tokens"] for answer in answers])
    assert new.shape == (len(prompts), NEW_TOKENS)
    with torch.no_grad():
        logits = model(torch.cat((prompts, new), dim=1)).logits
    probabilities = logits[:, prompts.shape[1] - 1 : -1].softmax(-1)
    # Where two tokens tie in float32, either is greedy; torch goes on from the one that vLLM took.
    chosen = probabilities.gather(-1, new.unsqueeze(-1)).squeeze(-1)
    assert (probabilities.amax(-1) - chosen).max() < TOLERANCE
    difference = max(
        abs(torch.tensor(value).exp().item() - probabilities[row, step, int(token)].item())
        for row, answer in enumerate(answers)
        for step, values in enumerate(answer["logprobs"])
        for token, value in values.items()
    )
    assert difference < TOLERANCE
    return int((new == probabilities.argmax(-1)).sum()), difference


def blocks(tokenizer: Any, shared: Path, split: str) -> Tensor:
    """Return the text of a split of WikiText-2 in rows of 128 tokens."""
    with gzip.open(shared / "data" / "wikitext2" / f"{split}.txt.gz", "rt", encoding="utf-8") as file:
        ids = tokenizer(file.read())["input_ids"]
    return torch.tensor(ids[: len(ids) // 128 * 128]).view(-1, 128)
