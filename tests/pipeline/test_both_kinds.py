"""Heads and neurons under one budget through the whole line, and what `criterion: auto` chooses, again by hand."""

import itertools
import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.loading import load_pruning, recipe_of
from support.models import save_regressor
from support.runs import without_tracing
from support.tolerance import REFITTED

import hies_export
from hies_export import (
    CompensationSection,
    PlanError,
    PruningRecipe,
    RecipeError,
    Report,
    collect_statistics,
    score_compensated,
)
from hies_export.calibrate.moments import MomentStore
from hies_export.data.batches import samples_of
from hies_export.evaluate.predict import predict
from hies_export.pipeline import choose as choosing
from hies_export.pipeline import draw as draws_module
from hies_export.pipeline import stages as stages_module
from hies_export.pipeline.choose import choose
from hies_export.pipeline.pruning import Pruning
from hies_export.pipeline.stages import Choice, calibrate, effect_batches, predict_pruned, refit_of, select
from hies_export.score.criteria import Scores, score_units
from hies_export.select.cost import CostTable
from hies_export.select.plan import PruningPlan
from hies_export.select.select import select_units
from hies_export.slim.bundles import flops_table
from hies_export.slim.cut import prune_units
from hies_export.slim.refit import refit
from hies_export.units.counts import count_flops
from hies_export.units.units import Selection

BUDGET = 0.45
TOLERANCE = 0.02
BOTH = ["attention", "mlp"]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor, whose predictions all differ, its data, and a recipe of both kinds."""
    prune = {"modules": BOTH, "criterion": "fisher", "budget": {"flops": BUDGET}}
    same = {"stability_tolerance": TOLERANCE}
    return save_regressor(tmp_path_factory.mktemp("both"), prune=prune, evaluation=same)


@dataclass
class Run:
    """A finished run of `criterion: auto`."""

    folder: Path
    recipe: PruningRecipe
    report: Report
    pruning: Pruning


@pytest.fixture(scope="session")
def done(folder: Path) -> Run:
    compensation = {"samples": 60}
    recipe = recipe_of(folder, prune__criterion="auto", prune__compensation=compensation, output=str(folder / "auto"))
    with pytest.MonkeyPatch.context() as patch, without_tracing():
        # As in a data set that has rows enough for all uses.
        patch.setattr(draws_module, "AUTO_SAMPLES", 90)
        return Run(folder / "auto", recipe, recipe.run(), load_pruning(recipe))


def test_a_run_cuts_both_kinds_and_counts_them(done: Run) -> None:
    report, plan = done.report, PruningPlan.from_file(done.folder / "plan.json")
    assert [kept.kind for kept in plan.kept.values()] == ["attention"] * 3 + ["mlp"] * 3
    assert (report.heads["total"], report.neurons["total"]) == (18, 192)
    for counts, kept in ((report.heads, plan.of_kind("attention")), (report.neurons, plan.of_kind("mlp"))):
        assert counts["kept_per_layer"] == [len(part.units) for part in kept.values()]
        assert counts["removed"] == counts["total"] - sum(counts["kept_per_layer"]) > 0
    assert report.cut_max_abs < 1e-4
    assert report.reload_max_abs < 1e-5
    slim = hies_export.load(done.folder / "slim")
    for number, layer in enumerate(slim.bert.encoder.layer):
        heads, neurons = (counts["kept_per_layer"][number] for counts in (report.heads, report.neurons))
        assert layer.attention.self.query.out_features == layer.attention.output.dense.in_features == 8 * heads
        assert layer.intermediate.dense.out_features == layer.output.dense.in_features == neurons
    (batch,) = done.pruning.shapes.values()
    flops = count_flops(slim, batch) / count_flops(done.pruning.model, batch)
    outcome = report.details.outcome
    assert outcome.budget.flops == BUDGET
    assert (outcome.predicted, outcome.found.value) == pytest.approx((flops, flops))
    assert BUDGET - 0.01 < flops <= BUDGET
    assert sum(p.numel() for p in slim.parameters()) == report.parameters["slim"]
    details = json.loads((done.folder / "report.json").read_text())["details"]
    assert {name: of["kept"] for name, of in details["neurons"].items()} == {
        f"bert.encoder.layer.{i}": count for i, count in enumerate(report.neurons["kept_per_layer"])
    }
    assert list(details["head_map"]) == [f"bert.encoder.layer.{i}.attention.self" for i in range(3)]


def test_a_score_of_every_unit_is_written(done: Run) -> None:
    written = json.loads((done.folder / "scores.json").read_text())
    sizes = {module.name: 6 if module.kind == "attention" else 64 for module in done.pruning.modules}
    assert {name: len(values) for name, values in written["scores"].items()} == sizes
    assert written["his"].keys() == sizes.keys()
    assert all(0 <= value <= 1 for value in itertools.chain(*written["scores"].values()))


def flops_of(prepared: Pruning) -> CostTable:
    (batch,) = prepared.shapes.values()
    return flops_table(prepared.model, prepared.modules, batch=batch)


def by_hand(prepared: Pruning) -> list[tuple[Scores, Selection]]:
    """Return what every criterion that takes one round would cut."""
    table = flops_of(prepared)
    statistics = collect_statistics(prepared.model, prepared.rows.score, prepared.modules)
    store = MomentStore(prepared.model, prepared.modules, prepared.rows.refit)
    scores = [
        # There are too few rows to reach the number of tokens that greedy removal wants, so it takes all.
        score_compensated(prepared.model, prepared.rows.refit, prepared.modules, moments=store),
        score_units(statistics, prepared.modules, criterion="fisher"),
        *(score_units(statistics, prepared.modules, alpha=alpha) for alpha in (0.3, 0.6, 0.9, 0.99)),
        score_units(statistics, prepared.modules, criterion="his"),
    ]
    return [(one, select_units(one, prepared.modules, table=table, ratio=BUDGET)) for one in scores]


def test_greedy_removal_reads_rows_until_it_has_enough_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(folder, prune__criterion="compensated", prune__compensation={"samples": 60})
    prepared = load_pruning(recipe)

    def rows(enough: int) -> list[dict[str, torch.Tensor]]:
        monkeypatch.setattr(stages_module, "EFFECT_TOKENS", enough)
        return effect_batches(prepared)

    lengths = torch.cat([batch["attention_mask"].sum(1) for batch in prepared.rows.refit]).tolist()
    assert len(lengths) == 60
    for enough, batches in ((1, 2), (sum(lengths[:30]), 3), (sum(lengths[:30]) + 1, 4), (sum(lengths) + 1, 6)):
        found = rows(enough)
        assert len(found) == batches  # of ten rows; never fewer than the 20 rows that are scored
        for batch, known in zip(found, prepared.rows.refit, strict=False):
            assert torch.equal(batch["input_ids"], known["input_ids"])
    # Without rows to refit on, those that are scored have to do.
    alone = replace(prepared, rows=replace(prepared.rows, refit=[]))
    assert effect_batches(alone) is prepared.rows.score


def agreement(dense: Any, other: Any) -> float:
    """Return the share of predictions that moved by no more than the tolerance."""
    moved = np.abs(np.asarray(dense).ravel() - np.asarray(other).ravel())
    return float((moved <= TOLERANCE).mean())


def pearson(prepared: Pruning, logits: Any) -> float:
    """Return the correlation with the labels of the held-out rows."""
    labels = torch.cat([batch["labels"] for batch in prepared.rows.held_out])
    return float(np.corrcoef(np.asarray(logits).ravel(), labels.numpy())[0, 1])


def test_what_auto_says_of_its_candidates_is_found_again_by_hand(done: Run) -> None:
    prepared, tried = done.pruning, done.report.details.tried
    store = MomentStore(prepared.model, prepared.modules, prepared.rows.refit, weighted=True)
    dense = predict(prepared.model, prepared.rows.held_out).values

    def judged(selection: Selection, weights: float) -> tuple[float, float]:
        slim = prune_units(prepared.model, selection, prepared.modules)
        refit(slim, selection, prepared.modules, store, CompensationSection(token_weights=weights))
        logits = predict(slim, prepared.rows.held_out).values
        return agreement(dense, logits), pearson(prepared, logits)

    candidates = by_hand(prepared)
    assert [t.candidate for t in tried[:7]] == list(range(7))
    assert [t.token_weights for t in tried] == [1.0] * 7 + [0.3, 0.1]
    assert len({t.stability for t in tried}) > 2  # candidates that are all alike would prove nothing
    for (scores, selection), row in zip(candidates, tried[:7], strict=True):
        assert (scores.criterion, scores.parameters.get("alpha")) == (row.criterion, row.alpha)
        assert judged(selection, 1.0) == pytest.approx((row.stability, row.quality), abs=REFITTED)
    # The best is judged with all weights of tokens; it is what the plan keeps.
    plan = PruningPlan.from_file(done.folder / "plan.json")
    for row in tried[7:]:
        assert judged(plan.kept, row.token_weights) == pytest.approx((row.stability, row.quality), abs=REFITTED)
    # What is saved is what was chosen.
    slim = predict(hies_export.load(done.folder / "slim"), prepared.rows.held_out).values
    (chosen,) = (row for row in tried if row.chosen)
    assert {row.candidate for row in tried[7:]} == {chosen.candidate}
    assert (plan.criterion, plan.alpha) == (chosen.criterion, chosen.alpha)
    assert agreement(dense, slim) == pytest.approx(chosen.stability)


def test_auto_is_judged_on_rows_that_nothing_else_saw(done: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws_module, "AUTO_SAMPLES", 90)
    rows = done.pruning.rows
    assert [samples_of(batches) for batches in (rows.score, rows.refit, rows.held_out)] == [20, 60, 90]
    # Shuffled by the recipe's seed: the first 20 of the 60 are scored on, and the 90 behind them are held out.
    load = partial(done.pruning.task.load, files=done.recipe.data.files)
    splits = draws_module.Splits(done.recipe.data, done.recipe.calibration, done.recipe.evaluation)
    found = draws_module.draw(splits, load, done.recipe.prune)
    drawn = load("train", samples=150, shuffle_seed=0)
    assert [*found.held_out] == [*drawn.select(range(60, 150))]
    assert [*found.compensation] == [*drawn.select(range(60))]


def chosen_by(recipe: PruningRecipe) -> tuple[Pruning, Choice]:
    pruning = load_pruning(recipe)
    return pruning, choose(pruning, calibrate(pruning))


def test_a_budget_of_parameters_covers_both_kinds(folder: Path) -> None:
    recipe = recipe_of(folder, prune__budget={"parameters": 0.7}, prune__multiple_of={"heads": 2, "neurons": 16})
    prepared, choice = chosen_by(recipe)
    slim = prune_units(prepared.model, choice.plan, prepared.modules)
    dense, left = (sum(p.numel() for p in model.parameters()) for model in (prepared.model, slim))
    assert left / dense <= 0.7
    assert choice.outcome.budget.parameters == 0.7
    assert choice.outcome.predicted == pytest.approx(left / dense)
    assert {len(kept.units) % 2 for kept in choice.plan.of_kind("attention").values()} == {0}
    assert {len(kept.units) % 16 for kept in choice.plan.of_kind("mlp").values()} == {0}
    assert choice.plan.removed > 0
    assert choice.plan.removed_neurons > 0


@pytest.mark.parametrize(
    ("fields", "neurons"),
    [
        ({"export": {"provider": "cuda", "dtype": "float16"}}, 8),
        ({"export": {"provider": "cuda", "dtype": "float16"}, "prune__multiple_of": {"neurons": 1}}, 1),
        ({"export": {"provider": "cuda"}}, None),
    ],
)
def test_widths_suit_the_half_precision_of_a_gpu(folder: Path, fields: dict[str, Any], neurons: int | None) -> None:
    assert load_pruning(recipe_of(folder, **fields)).options.multiple_of.neurons == neurons


@pytest.mark.parametrize(
    ("prune", "message"),
    [
        ({"modules": ["mlp"], "criterion": "hies"}, r"hies scores heads, but prune.modules is \[mlp\]; choose one of"),
        ({"multiple_of": {"heads": 5, "neurons": 10}}, "2 problems"),
    ],
)
def test_bad_input_is_refused_before_anything_is_computed(prune: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(RecipeError, match=message):
        load_pruning(recipe_of(folder, **{f"prune__{name}": value for name, value in prune.items()}))


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        ({"prune__modules": ["mlp"]}, "neurons that may go"),
        ({"prune__keep_layers": [0, 1], "prune__criterion": "auto"}, "heads and neurons that may go"),
    ],
)
def test_a_budget_below_what_is_left_says_the_least_before_scoring(
    folder: Path, overrides: dict[str, Any], what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages_module, "collect_statistics", lambda *a, **k: pytest.fail("scored"))
    recipe = recipe_of(folder, prune__budget={"flops": 0.1}, **overrides)
    with pytest.raises(PlanError, match=f"FLOPs at most 0.1 of dense, but cutting all {what}.* gives 0.*, the best"):
        chosen_by(recipe)


@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_all_that_may_go_is_among_the_cuts_of_keep(folder: Path, allocation: str) -> None:
    prepared = load_pruning(recipe_of(folder))
    effects = {m.name: torch.rand(m.units, dtype=torch.float64) for m in prepared.modules}
    scores = Scores("fisher", {}, effects, effects)
    for min_heads, neurons in ((1, 4), (3, 1)):
        recipe = recipe_of(
            folder,
            prune__budget={"keep": {"metric": "pearson", "by": 0.03}},
            prune__allocation=allocation,
            prune__min_heads=min_heads,
            prune__multiple_of={"neurons": neurons},
        )
        asked = replace(prepared, options=recipe.options)
        selection = select(asked, scores, choosing.sizes_of(asked, None)[-1])
        if allocation == "global":
            assert [len(kept.units) for kept in selection.values()] == [min_heads] * 3 + [neurons] * 3


def test_auto_without_compensation_judges_masked_models(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = {"prune__modules": ["attention"], "prune__budget": {"heads": 0.5}, "prune__compensation": None}
    prepared, choice = chosen_by(recipe_of(folder, prune__criterion="auto", **options))
    assert "auto ranks units by the errors that least squares leaves, but prune.compensation is not set" in caplog.text
    assert [tried.criterion for tried in choice.tried] == ["fisher", *["hies"] * 4, "his", "compensated"]
    assert {tried.token_weights for tried in choice.tried} == {1.0}
    (chosen,) = (tried for tried in choice.tried if tried.chosen)
    assert chosen.stability >= choice.tried[0].stability
    dense = predict(prepared.model, prepared.rows.held_out).values
    masked = predict_pruned(prepared, choice.plan.kept, prepared.rows.held_out, None).values
    assert agreement(dense, masked) == pytest.approx(chosen.stability)
    assert (choice.plan.criterion, choice.plan.alpha) == (chosen.criterion, chosen.alpha)
    assert refit_of(prepared, choice.statistics) is None
