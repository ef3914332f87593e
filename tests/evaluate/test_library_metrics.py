"""Metrics of the `evaluate` library, from scripts in a local folder, against numpy."""

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sklearn.metrics
import torch
from support.loading import load_pruning
from support.models import save_project, save_text_model
from support.reading import classifying, given

from hies_export import DataError, PruningRecipe, RecipeError
from hies_export.evaluate import metrics
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.metrics import METRICS, check_metrics, find_metric, higher_is_better

SCRIPT = """
import datasets
import evaluate
import numpy as np


class {name}(evaluate.Metric):
    higher_is_better = {higher_is_better}

    def _info(self):
        value = datasets.Value("{dtype}")
        features = datasets.Features({{"predictions": value, "references": value}})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        predictions, references = np.array(predictions), np.array(references)
        return {result}
"""


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """Forget afterwards what a test loaded; write none of it to the user's cache."""
    monkeypatch.setattr("evaluate.config.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setattr("evaluate.config.HF_METRICS_CACHE", tmp_path / "cache")
    # Scripts are imported from a package in that folder, found once in a process.
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for module in [name for name in sys.modules if name.partition(".")[0] == "evaluate_modules"]:
        monkeypatch.delitem(sys.modules, module)
    before = dict(METRICS)
    yield
    METRICS.clear()
    METRICS.update(before)


def script(folder: Path, name: str, result: str, *, dtype: str = "int64", higher_is_better: bool = True) -> str:
    """Write a metric as `evaluate` wants it, a folder with a file of the same name, and return its path."""
    (folder / name).mkdir()
    fields = {"name": name.title().replace("_", ""), "dtype": dtype, "higher_is_better": higher_is_better}
    (folder / name / f"{name}.py").write_text(textwrap.dedent(SCRIPT).format(**fields, result=result))
    return str(folder / name)


def metrics_of(logits: torch.Tensor, labels: torch.Tensor, *names: str) -> Any:
    """Return the metrics that a judge of the dense model gives it on batches with these labels."""
    found = given(logits)
    return Judge([{"labels": labels}], found, names, classifying(found.kind)).of(found).metrics


def test_a_metric_of_classes(tmp_path: Path) -> None:
    name = script(tmp_path, "hits_of_one", '{"hits_of_one": (predictions[references == 1] == 1).mean()}')
    check_metrics(["accuracy", name])
    logits, labels = torch.randn(60, 3), torch.randint(0, 3, (60,))
    classes = logits.argmax(-1).numpy()
    hits = [classes[i] == 1 for i in range(60) if labels[i] == 1]
    values = metrics_of(logits, labels, "accuracy", name)
    assert values == {"accuracy": (classes == labels.numpy()).mean(), name: pytest.approx(np.mean(hits))}
    assert METRICS[name].higher_is_better


def test_a_metric_of_numbers_of_which_less_is_better(tmp_path: Path) -> None:
    # One value under any name will do.
    result = '{"distance": np.abs(predictions - references).mean()}'
    name = script(tmp_path, "mean_distance", result, dtype="float64", higher_is_better=False)
    logits, labels = torch.randn(20, 1), torch.rand(20)
    values = metrics_of(logits, labels, name)
    assert values == {name: pytest.approx((logits[:, 0] - labels).abs().mean().item())}
    assert (find_metric(name).of, higher_is_better(name)) == ("numbers", False)


def test_which_way_is_better_is_known_without_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.evaluate, "load", lambda *_, **__: pytest.fail("loaded"))
    names = ["accuracy", "perplexity", "nats_per_character", "mse", "recall", "some/where/recall_gap"]
    assert [higher_is_better(name) for name in names] == [True, False, False, False, True, True]


@pytest.mark.parametrize(
    ("dtype", "result", "message"),
    [
        ("string", '{"other": 1.0}', "must compare classes or numbers, one per sample, but .*other' takes"),
        ("int64", '{"low": 0.0, "high": 1.0}', "must give one number for predictions of 2 classes.*it gives low, high"),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused_before_any_work(
    tmp_path: Path, dtype: str, result: str, message: str
) -> None:
    name = script(tmp_path, "other", result, dtype=dtype)
    with pytest.raises(RecipeError, match=message):
        check_metrics([name], labels=2)


def test_a_script_that_does_not_load_or_fails_on_the_predictions_is_quoted(tmp_path: Path) -> None:
    name = script(tmp_path, "broken", "{}")
    (tmp_path / "broken" / "broken.py").write_text("import evaluate\nraise ValueError('no such thing')\n")
    with pytest.raises(RecipeError, match="or one that evaluate.load finds, got .*broken.*no such thing"):
        check_metrics([name])
    name = script(tmp_path, "binary", '{"binary": float([0.0, 1.0][predictions.max()])}')
    check_metrics([name])
    with pytest.raises(DataError, match="binary' must give one number .*list index out of range"):
        metrics_of(torch.eye(3), torch.arange(3), name)


@pytest.mark.parametrize(
    ("kind", "metric", "fails", "works"),
    [
        ("classes", lambda given, wanted, **_: sklearn.metrics.precision_score(wanted, given), 3, 2),
        ("own classes", lambda given, wanted, num_labels: [1.0, 1.0][num_labels - 1], 3, 2),
        ("labels", lambda given, wanted: (given == wanted)[:, 3].mean(), 3, 4),
        ("numbers", lambda given, wanted: "a number", 1, None),
    ],
)
def test_a_metric_is_tried_on_as_many_labels_as_the_model_has(
    kind: str, metric: Any, fails: int, works: int | None
) -> None:
    metrics.register_metric("tried", of=kind)(metric)
    predicts = kind.removeprefix("own ")
    with pytest.raises(RecipeError, match=f"'tried' must give one number for predictions of {fails} {predicts}: "):
        check_metrics(["tried"], predicts=predicts, labels=fails)
    if works is not None:
        check_metrics(["tried"], predicts=predicts, labels=works)


def test_a_recipe_of_three_classes_refuses_the_precision_of_two(tmp_path: Path) -> None:
    save_project(tmp_path, train=4, validation=4, prune={"budget": {"heads": 0.5}})
    save_text_model(tmp_path / "model", num_labels=3)
    result = '{"precise": __import__("sklearn.metrics").metrics.precision_score(references, predictions)}'
    name = script(tmp_path, "precise", result)
    recipe = PruningRecipe.from_yaml(tmp_path / "recipe.yaml", {"evaluation.metrics": [name]})
    with pytest.raises(RecipeError, match="precise' must give one number for predictions of 3 classes: ValueError: "):
        load_pruning(recipe)


def test_a_script_is_relative_to_the_recipe(tmp_path: Path) -> None:
    asked = {"metrics": ["./own", "accuracy", "owner/name"]}
    save_project(tmp_path, train=4, validation=4, prune={"budget": {"heads": 0.5}}, evaluation=asked)
    path = script(tmp_path, "own", '{"own": 1.0}')
    (tmp_path / "accuracy").mkdir()  # no path, so still the name of a metric
    assert PruningRecipe.from_yaml(tmp_path / "recipe.yaml").evaluation.metrics == (path, "accuracy", "owner/name")
