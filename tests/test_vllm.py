"""Slim checkpoints in vLLM on the CPU: the tokens and the probabilities of torch.

`scripts/vllm` makes the environment and runs this; `HIES_VLLM_PYTHON` names its interpreter.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from support.models import shake
from support.tiers import run_in, table_of
from support.vllm_generate import NEW_TOKENS

from hies_export import PruningPlan, find_modules, prune_units, save_slim
from hies_export.kinds import ATTENTION, MLP
from hies_export.slim.config import is_slim

ROOT = Path(__file__).parents[1]
PYTHON = Path(os.environ.get("HIES_VLLM_PYTHON", ROOT / ".vllm" / "bin" / "python"))

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.is_file(), reason="no environment of vLLM: run scripts/vllm"),
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
    """A cut and how vLLM is asked to run it.

    Attributes:
        family: Of the dense model.
        groups: Groups of heads kept in each layer, of 4; None for all.
        neurons: Neurons kept in each layer, of 688; None for all.
        written: Model type of the slim checkpoint.
        options: Of `vllm.LLM`.
        fields: Of the dense config.
    """

    family: str
    groups: tuple[int, ...] | None
    neurons: tuple[int, ...] | None
    written: str
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


EVEN, UNEVEN = (512,) * 4, (300, 337, 411, 640)
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
}


table = table_of("HIES_VLLM_TABLE", "family", "cut", "written as", "vLLM's options", "tokens", "probabilities differ")


@pytest.mark.parametrize("name", CASES)
def test_vllm_continues_as_torch_does(name: str, table: list[Any], tmp_path: Path) -> None:
    case = CASES[name]
    stock = getattr(transformers, f"{case.family}ForCausalLM")
    dense = shake(stock(stock.config_class(**{**SIZES, **case.fields})))
    prompts = torch.randint(5, SIZES["vocab_size"], (2, 24))
    modules = find_modules(dense, {"input_ids": prompts}, kinds=(ATTENTION, MLP))
    wanted = {ATTENTION: case.groups, MLP: case.neurons}
    kept = {}
    for kind, counts in wanted.items():
        found = [module for module in modules if module.kind == kind]
        for module, count in zip(found, counts or (found[0].groups,) * len(found), strict=True):
            groups = set(torch.randperm(module.groups)[:count].tolist())
            kept[module.name] = module.kept(u for u in range(module.units) if u // module.group_size in groups)
    plan = PruningPlan(kept={module.name: kept[module.name] for module in modules}, criterion="random")
    slim = prune_units(dense, plan, modules)
    assert (slim.config.model_type, is_slim(slim)) == (case.written, "trust_remote_code" in case.options)
    save_slim(slim, tmp_path / "slim", plan=plan, batch={"input_ids": prompts})

    (tmp_path / "prompts.json").write_text(json.dumps(prompts.tolist()))
    (tmp_path / "options.json").write_text(json.dumps(case.options))
    run_in(PYTHON, "vllm_generate.py", tmp_path / "slim", tmp_path)
    answers = json.loads((tmp_path / "answers.json").read_text())

    new = torch.tensor([answer["tokens"] for answer in answers])
    assert new.shape == (2, NEW_TOKENS)
    with torch.no_grad():
        logits = slim(torch.cat((prompts, new), dim=1)).logits
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
    options = ", ".join(f"{key}={value}" for key, value in case.options.items()) or "none"
    equal = int((new == probabilities.argmax(-1)).sum())
    table.append((case.family, name, case.written, options, f"{equal} of {new.numel()} equal", f"{difference:.1e}"))
    assert difference < TOLERANCE
