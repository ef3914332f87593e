"""The public names: documented in full, with examples that run."""

import copy
import doctest
import inspect
import re
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import bert, text_batch, word_tokenizer
from support.runs import registries_restored

import hies_export
from hies_export.errors import HiesError

PUBLIC = {name: getattr(hies_export, name) for name in hies_export.__all__}
FUNCTIONS = {name: value for name, value in PUBLIC.items() if inspect.isfunction(value)}
CLASSES = {name: value for name, value in PUBLIC.items() if inspect.isclass(value)}
# A package of an extra that an example needs.
NEEDED = {"quantize_openvino": "nncf"}
# Those of whole folders, which examples/ run and of decoders.
WITHOUT_EXAMPLE = {"bench", "deploy", "export_gguf", "generate_text", "push_to_hub", "run"}


@cache
def stages(layers: int) -> dict[str, Any]:
    """Return what the examples start from: a tiny BERT with labelled batches, and what the stages make of them."""
    torch.manual_seed(0)
    model, batches = bert(num_hidden_layers=layers), [text_batch(4, 10 + i) for i in range(8)]
    modules = hies_export.find_attention(model, batches[0])
    statistics = hies_export.collect_statistics(model, batches, modules)
    scores = hies_export.score_units(statistics, criterion="hies", alpha=0.5)
    selection = hies_export.select_units(scores, modules, heads=0.5)
    plan = hies_export.PruningPlan("hies", alpha=0.5, kept=selection)
    made = {"model": model, "batches": batches, "modules": modules, "statistics": statistics, "scores": scores}
    made |= {"plan": plan, "slim": hies_export.prune_units(model, plan, modules)}
    return made | {"tokenizer": word_tokenizer([*"abcd"])}


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder()
    found = (test for name, value in (FUNCTIONS | CLASSES).items() for test in finder.find(value, name))
    return [test for test in found if test.examples]


@pytest.mark.parametrize("example", examples(), ids=lambda example: example.name)
def test_examples_run(example: doctest.DocTest, tmp_path: Path) -> None:
    if example.name in NEEDED:
        pytest.importorskip(NEEDED[example.name])
    # A trace takes seconds a layer.
    made = stages(1 if any("export_onnx(" in line.source for line in example.examples) else 3)
    own = {"slim": copy.deepcopy(made["slim"])}  # which some refit in place, in any order
    example.globs = PUBLIC | made | own | {"folder": tmp_path, "torch": torch}
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with registries_restored():
        assert runner.run(example, out=said.append).failed == 0, "".join(said)


def test_every_function_has_an_example() -> None:
    assert FUNCTIONS.keys() - {example.name for example in examples()} == WITHOUT_EXAMPLE


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_every_argument_is_described(name: str) -> None:
    text = inspect.getdoc(FUNCTIONS[name]) or ""
    arguments = text.partition("Args:\n")[2].partition("\n\n")[0]
    described = {
        n for names in re.findall(r"^    ([\w, *]+):", arguments, re.MULTILINE) for n in re.findall(r"\w+", names)
    }
    assert described == set(inspect.signature(FUNCTIONS[name]).parameters)
    returns = inspect.signature(FUNCTIONS[name]).return_annotation
    assert "Returns:" in text or str(returns) in ("None", "AbstractContextManager[None]")


@pytest.mark.parametrize("name", sorted(n for n, c in CLASSES.items() if not issubclass(c, HiesError)))
def test_every_field_is_described(name: str) -> None:
    text = inspect.getdoc(CLASSES[name]) or ""
    fields = getattr(CLASSES[name], "__dataclass_fields__", None) or getattr(CLASSES[name], "model_fields", {})
    assert [f for f in fields if not re.search(rf"\b{f}\b", text)] == []
    methods = [m for m, v in vars(CLASSES[name]).items() if not m.startswith("_") and callable(v)]
    assert [m for m in methods if not inspect.getdoc(getattr(CLASSES[name], m))] == []


def test_pruning_on_tensors_imports_nothing_that_reads_rows() -> None:
    """These libraries take 140 MB."""
    code = """
import sys, torch
from transformers import LlamaConfig, LlamaForCausalLM
from hies_export import prune
sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
rows = [{"input_ids": torch.arange(16).view(2, 8)} for _ in range(4)]
prune(LlamaForCausalLM(LlamaConfig(vocab_size=20, **sizes)), rows, budget={"flops": 0.9})
print(*sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    modules = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert "hies_export" in modules
    assert not {"datasets", "evaluate", "pandas", "pyarrow", "sklearn", "onnxruntime"} & modules
