"""A budget of `keep`: the largest cut that keeps its promise, again by hand, and what a run says of it."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from scipy.stats import binomtest, pearsonr
from support.loading import load_pruning, recipe_of
from support.models import save_regressor
from support.runs import without_tracing

from hies_export import DropError, RequestError, Selection, flops_table, prune, prune_units, score_units, select_units
from hies_export.calibrate.moments import MomentStore
from hies_export.evaluate.interval import FAILURES, confidence_of_each
from hies_export.evaluate.predict import predict
from hies_export.pipeline import choose as choosing
from hies_export.pipeline import search
from hies_export.pipeline.choose import choose
from hies_export.pipeline.draw import Splits, draw
from hies_export.pipeline.options import PruneSection
from hies_export.pipeline.pruning import Pruning, Rows
from hies_export.pipeline.stages import calibrate, confirm, cut
from hies_export.recipe.budget import Budget, KeepBudget, Outcome
from hies_export.slim.refit import refit

BOTH = ["attention", "mlp"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor, whose predictions all differ, its data, and a recipe of both kinds."""
    prune = {"modules": BOTH, "criterion": "fisher", "budget": {"keep": 0.8}}
    return save_regressor(tmp_path_factory.mktemp("keep"), prune=prune)


@pytest.mark.parametrize("asked", [{"predictions": 0.8}, {"metric": "pearson", "by": 0.1}], ids=list)
def test_the_most_that_a_promise_allows(folder: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choosing, "SIZES", 12)
    monkeypatch.setattr("hies_export.pipeline.pruning.LEAST_FOR_LOSS", 20)
    monkeypatch.setattr("hies_export.evaluate.judge._RESAMPLES", 200)
    recipe = recipe_of(folder, prune__budget={"keep": asked}, prune__compensation={"samples": 60})
    prepared = load_pruning(recipe)
    choice = choose(prepared, calibrate(prepared))
    (batch,), rows = prepared.shapes.values(), prepared.rows.held_out
    table = flops_table(prepared.model, prepared.scored, batch=batch, unit="group")
    scores = score_units(choice.statistics, prepared.modules, criterion="fisher")
    least = 1 - sum(row[-2] for row in table.saved.values())  # a unit of each module stays
    moments = MomentStore(prepared.model, prepared.modules, prepared.rows.refit)
    dense = predict(prepared.model, rows).values
    confidence = confidence_of_each(FAILURES)

    def keeps(size: int) -> bool:
        selection = selected(size)
        slim = prune_units(prepared.model, selection, prepared.modules)
        refit(slim, selection, prepared.modules, moments)
        found = predict(slim, rows).values
        if "metric" in asked:
            wanted = torch.cat([batch["labels"] for batch in rows]).numpy()
            draws = np.random.default_rng(0).integers(len(wanted), size=(200, len(wanted)))
            one, two = dense[:, 0].numpy(), found[:, 0].numpy()
            lost = [pearsonr(one[d], wanted[d])[0] - pearsonr(two[d], wanted[d])[0] for d in draws]
            return bool(np.quantile(lost, (1 + confidence) / 2) <= asked["by"])
        same = int(((dense - found).abs() <= recipe.evaluation.stability_tolerance).sum())
        return bool(binomtest(same, len(dense)).proportion_ci(confidence, method="exact").low >= asked["predictions"])

    def selected(size: int) -> Selection:
        return select_units(scores, prepared.modules, table=table, ratio=1 - (1 - least) * size / 12 + 1e-9)

    size = next(number for number in range(1, 13) if selected(number) == choice.plan.kept)
    assert keeps(size)
    assert size < 12
    assert not keeps(size + 1)
    guessed = [row for row in choice.outcome.judged if row.get("guess")]
    assert choice.outcome.judged[: len(guessed)] == tuple(guessed)
    assert len(choice.outcome.judged) - len(guessed) <= 7
    assert choice.outcome.confidence == confidence
    slim = cut(prepared, choice)
    assert slim.outcome.met
    all_of_them = Budget(keep=KeepBudget.model_construct(predictions=1.0))
    with pytest.raises(DropError, match=r"keep asks for .* on the held-out rows. The model that was judged kept to it"):
        confirm(prepared, replace(slim, outcome=replace(choice.outcome, budget=all_of_them)))


def test_a_run_says_what_was_promised_and_what_came_of_it(folder: Path, tmp_path: Path) -> None:
    with without_tracing():
        recipe = recipe_of(folder, prune__compensation={"samples": 60}, output=str(tmp_path / "out"))
        report = recipe.run()
    found = json.loads((tmp_path / "out" / "report.json").read_text())
    outcome = found["details"]["outcome"]
    assert (outcome["budget"], outcome["samples"]) == ({"keep": {"predictions": 0.8}}, 28)
    assert outcome["found"]["value"] >= outcome["found"]["bound"] >= 0.8
    assert outcome["found"]["value"] in [row["kept"] for row in outcome["judged"]]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "80 % of the predictions, promised on 28 rows of validation. Found " in text
    kept = "all" if report.stability == 1 else f"{'only ' * (report.stability < 0.8)}{100 * report.stability:.1f} %"
    said = f"promised 80 % of the predictions within 0.02; kept {kept} of 12 other rows ("
    assert text.split("\n\n")[1].startswith(said)


def test_a_promise_of_time_removes_what_saves_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As if only neurons took time.
    def table_of_time(model: Any, modules: Any, where: Any, **_: Any) -> Any:
        assert (where.runtime, where.batch["input_ids"].shape) == ("torch", (3, 9))
        flops = flops_table(model, modules, batch=where.batch, unit="group")
        free = {m.name: (0.0,) * len(flops.saved[m.name]) for m in modules if m.kind == "attention"}
        return replace(flops, saved={**flops.saved, **free})

    monkeypatch.setattr("hies_export.pipeline.delivery.latency_table", table_of_time)
    keep = {"predictions": 0.8, "runtime": "torch", "batch": 3, "sequence": 9}
    recipe = recipe_of(folder, prune__budget={"keep": keep}, prune__compensation={"samples": 60})
    prepared = load_pruning(recipe)
    choice = choose(prepared, calibrate(prepared))
    assert choice.plan.removed_neurons
    assert not choice.plan.removed
    where = choice.outcome.budget.keep
    assert (where.runtime, where.batch, where.sequence) == ("torch", 3, 9)
    assert 0 < choice.outcome.predicted < 1


@pytest.mark.parametrize(("refitted", "held_out"), [(20, 130), (40, 110), (60, 100), (150, 100)])
def test_nothing_is_promised_on_rows_that_are_refitted_on(folder: Path, refitted: int, held_out: int) -> None:
    """Of 150 rows, the refit gets those that it asks for, up to a third."""
    recipe = recipe_of(folder, prune__compensation={"samples": refitted})
    splits = Splits(recipe.data, recipe.calibration.model_copy(update={"samples": 20}), recipe.evaluation)
    rows = draw(splits, lambda *_, **__: Dataset.from_dict({"id": range(150)}), recipe.prune)
    assert rows.held_out["id"] == list(range(150 - held_out, 150))
    assert rows.compensation["id"] == list(range(150 - held_out))
    assert rows.scoring["id"] == list(range(20))


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ({"predictions": 0.99}, "0.99 can be promised with 95 % confidence from 477 held-out rows or more"),
        ({"predictions": 0.8, "samples": 9}, "from 22 held-out rows or more, and there are 9"),
        ({"metric": "pearson"}, "keep needs predictions, or metric and by, got metric"),
        ({"predictions": 0.9, "by": 0.1}, "keep needs predictions, or metric and by, got predictions and by"),
        ({"metric": "pearson", "predictions": 0.9}, "or metric and by, got predictions and metric"),
        ({"metric": "ndcg@10"}, "the metrics of a regression must be among pearson, spearman, got 'ndcg@10'"),
        ({"predictions": 0.9, "batch": 4}, "keep.batch says what is timed, and no runtime is named"),
        ({"metric": "parson", "by": 0.1}, "metric must be one of"),
        ({"predictions": 0.8, "index": "slim"}, "keep.index says which vectors of documents queries search"),
    ],
)
def test_promises_that_cannot_be_told_or_made_are_refused(folder: Path, keep: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError, match=said):
        load_pruning(recipe_of(folder, prune__budget={"keep": keep}))


def test_in_memory_a_promise_is_a_share_on_rows_that_are_given(folder: Path) -> None:
    prepared = load_pruning(recipe_of(folder))
    for keep, said in (({"predictions": 0.5, "samples": 20}, "how many rows a recipe draws"), (1.0, "less than 1")):
        with pytest.raises(RequestError, match=said):
            prune(prepared.model, prepared.rows.held_out, budget={"keep": keep})


def asked_of(fields: dict[str, Any]) -> KeepBudget:
    """Return the promise of a recipe's section `prune`."""
    return PruneSection(budget={"keep": fields}).goal.keep


def test_a_metric_of_rankings_is_kept_to_99_percent_unless_it_is_said() -> None:
    assert asked_of({"metric": "ndcg@10", "index": "dense"}).predictions == 0.99
    assert asked_of({"metric": "mrr@10", "predictions": 0.9}).predictions == 0.9
    assert asked_of({"metric": "own_ndcg@10", "by": 0.01}).predictions is None
    dumped = asked_of({"metric": "ndcg@10"}).model_dump(exclude_unset=True)
    assert asked_of(dumped) == KeepBudget(metric="ndcg@10", predictions=0.99)


def queries(count: int) -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": torch.zeros(count, 2), "query": torch.arange(count)}]


def promise_of(asked: dict[str, Any], rows: Any, task: Any, metrics: tuple[str, ...]) -> Outcome:
    """Return the promise for held-out rows of sentences."""
    options = PruneSection(budget=Budget(keep=asked_of(asked)))
    fields: Any = {"model": None, "processor": None, "modules": (), "scored": (), "shapes": {}}
    fields |= {"serve": None, "time_cuts": None, "task": task, "rows": Rows([], rows), "metrics": metrics}
    return search.promise_of(Pruning(options=options, **fields), 0.98)


@pytest.mark.parametrize(
    ("asked", "rows", "embeds", "metric", "index"),
    [
        ({"predictions": 0.99}, queries(7), True, "mrr@10", "dense"),
        ({"metric": "ndcg@10", "index": "slim"}, queries(7), True, "ndcg@10", "slim"),
        ({"predictions": 0.99}, [{"input_ids": torch.zeros(7, 2)}], True, "mrr@10", "dense"),
        ({"predictions": 0.99}, [{"pair": torch.arange(14) // 2}], True, "mrr@10", None),
        ({"predictions": 0.99}, [{"group": torch.arange(14) // 2}], False, "mrr@10", None),
        ({"predictions": 0.99}, [{"input_ids": torch.zeros(7, 2)}], False, None, None),
    ],
)
def test_a_share_of_rankings_is_that_of_a_metric(
    asked: dict[str, Any], rows: Any, embeds: bool, metric: str | None, index: str | None
) -> None:
    metrics = ("accuracy",) if metric is None else ("mrr@10", "ndcg@10")
    found = promise_of(asked, rows, SimpleNamespace(embeds=embeds, generative=False, word="one"), metrics)
    keep = found.budget.keep
    assert (keep.metric, keep.index, found.samples) == (metric, index, 7)
    assert (keep.predictions, found.confidence) == (0.99, 0.98)
