"""A task that a user registers, that of examples/custom_task.py: it is pruned and run as the others are."""

import re
import runpy
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import onnxruntime
import pytest
import torch
from support.models import SIX_HEADS, shake, word_tokenizer
from support.reports import make_report
from support.runs import registries_restored
from transformers import BertConfig, BertForNextSentencePrediction

from hies_export import DataError, PruningRecipe, RecipeError, load, prune, register_task
from hies_export.report.card import render_card
from hies_export.tasks import TASKS, registry

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "custom_task.py"
WORDS = [f"w{number}" for number in range(20)]
TEXTS = [
    " ".join(WORDS[(start * 7 + place * (1 + start // 180)) % 20] for place in range(2 + start % 9))
    for start in range(240)
]


@pytest.fixture(autouse=True, scope="module")
def example() -> Iterator[dict[str, Any]]:
    """What the example defines."""
    with registries_restored(), pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE.parent)
        yield runpy.run_path(str(EXAMPLE), run_name="custom_task")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model of the task with its tokenizer, and texts."""
    folder, tokenizer = tmp_path_factory.mktemp("own"), word_tokenizer(WORDS)
    torch.manual_seed(0)
    # One matrix is large enough for 8 bits.
    sizes = SIX_HEADS | {"num_hidden_layers": 1, "intermediate_size": 352, "num_labels": 2}
    config = BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **sizes)
    shake(BertForNextSentencePrediction(config)).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    (folder / "text.txt").write_text("\n".join(TEXTS))
    return folder


def recipe_of(folder: Path, output: Path, **sections: Any) -> PruningRecipe:
    usual = {
        "data": {"files": {"train": folder / "text.txt"}, "text": "text"},
        "calibration": {"split": "train[:50%]", "samples": 16, "batch_size": 8},
        "evaluation": {"split": "train[50%:]"},
        "prune": {"criterion": "his", "budget": {"heads": 0.3}},
        "measure": {"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 2},
    }
    return PruningRecipe(model=str(folder / "model"), task="sentence-order", output=output, **(usual | sections))


def test_prune_predicts_and_judges_as_its_objects_say(folder: Path) -> None:
    model, tokenizer = load(folder / "model"), word_tokenizer(WORDS)
    rows, held_out = (datasets.Dataset.from_dict({"text": texts}) for texts in (TEXTS[:64], TEXTS[64:96]))
    result = prune(model, rows, held_out=held_out, processor=tokenizer, budget={"heads": 0.5})
    assert isinstance(result.model, BertForNextSentencePrediction)
    found, wanted = result.held_out, []
    for text in TEXTS[64:96]:
        words, swapped = text.split(), zlib.crc32(text.encode()) % 2
        pair = [" ".join(words[: len(words) // 2]), " ".join(words[len(words) // 2 :])]
        with torch.inference_mode():
            logits = model(**tokenizer(*(pair[::-1] if swapped else pair), return_tensors="pt")).logits
        wanted.append((logits.softmax(-1)[0, 1].item() - swapped) ** 2)
    assert found is not None
    assert found.metrics["brier"].dense == pytest.approx(sum(wanted) / 32, abs=1e-5)


def test_a_task_of_classes_takes_a_name_and_a_class(folder: Path) -> None:
    """The second block of the guide, executed."""
    guide = EXAMPLE.parents[1] / "docs" / "guides" / "task.md"
    blocks = re.findall(r"(?s)``` { .python }\n(.*?)```", guide.read_text())
    block = next(block for block in blocks if "class " in block)
    names: dict[str, Any] = {"__name__": "guide"}
    with registries_restored():
        exec(block, names)
        TASKS.pop("sentence-order")
        pairs = [*zip(TEXTS[:32], TEXTS[32:64], strict=True)]
        result = prune(load(folder / "model"), pairs, processor=word_tokenizer(WORDS), budget={"heads": 0.5})
        assert type(result.pruning.task) is names["NextSentencePrediction"]
        assert result.held_out is not None
        assert result.held_out.metrics.keys() == {"accuracy"}
        batch = {"input_ids": torch.ones(4, 6, dtype=torch.int64), "labels": torch.tensor([0, 1, 2, 0])}
        with pytest.raises(DataError, match=r"labels .*in \[0, 2\), .* has 2"):
            prune(load(folder / "model"), [batch] * 2, budget={"heads": 0.5})


@pytest.mark.parametrize(("task", "location"), [("sentence-order", "slim"), ("unknown-here", "user/slim")])
def test_a_card_of_no_built_in_task_opens_the_graph(task: str, location: str) -> None:
    card = render_card(replace(make_report(), task=task), location=location)
    assert "InferenceSession(" in card
    assert "generate_text" not in card
    assert ("snapshot_download(" in card) is ("/" in location)


@pytest.mark.slow
def test_run_writes_a_report_and_a_card_that_names_no_pipeline(folder: Path, tmp_path: Path) -> None:
    report = recipe_of(folder, tmp_path / "out", export={"quantize": "int8"}).run()
    found: Any = (report.task, report.details.stability_of, report.quality.metric)
    assert found == ("sentence-order", "probability", "brier")
    assert report.onnx_max_abs is not None
    assert report.onnx_max_abs < 1e-3
    assert report.exported is not None
    assert report.exported.quality is not None
    card = (tmp_path / "out" / "slim" / "README.md").read_text()
    assert "pipeline_tag" not in card
    assert "generate_text" not in card
    assert "AutoModelForNextSentencePrediction.from_pretrained" in card
    (line,) = re.findall(r"^session = Infer.*$", card, re.MULTILINE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path / "out")
        names: dict[str, Any] = {"InferenceSession": onnxruntime.InferenceSession}
        exec(line, names)
    assert [output.name for output in names["session"].get_outputs()] == ["logits"]


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"text": ["text", "other"]}, r"sentence-order needs data.text \(one column\)"),
        ({"text": "text", "label": "label"}, r"sentence-order needs data.text \(one column\) and no data.label"),
    ],
)
def test_columns_that_it_does_not_read_are_refused(columns: dict[str, Any], match: str, folder: Path) -> None:
    with pytest.raises(RecipeError, match=match):
        recipe_of(folder, Path("out"), data={"files": {"train": folder / "text.txt"}, **columns})


def test_what_it_refuses_is_said(folder: Path) -> None:
    rows = datasets.Dataset.from_dict({"text": ["a b", "alone"]})
    for given, match in (
        (rows, r"two words to have halves, but row \d \(from 0\) has fewer"),
        (["a text"], "batches of sentence-order must be batches or a data set, got a list of texts"),
    ):
        with pytest.raises(DataError, match=match):
            prune(load(folder / "model"), given, processor=word_tokenizer(WORDS), budget={"heads": 0.5})


def test_a_task_is_registered_as_it_is() -> None:
    known: Any = TASKS["sentence-order"]
    assert register_task(known) is known


def test_tasks_are_known_by_the_classes_that_load_their_models() -> None:
    assert {name: auto_class for name, (_, auto_class) in registry.BUILT_IN.items()} == {
        name: TASKS[name].auto_class for name in registry.BUILT_IN
    }
    with registries_restored():
        register_task(type("Other", (TASKS["fill-mask"],), {"auto_class": "AutoModelForNextSentencePrediction"}))
        found = registry.task_by_class("BertForNextSentencePrediction", BertConfig())
        assert found is TASKS["fill-mask"]
        assert registry.task_by_class("BertForMaskedLM", BertConfig()) is None
