"""Budgets of FLOPs, time and quality: against brute force, the counter, the masked model and a run."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.cuts import plan_of
from support.models import bert, causal_lm, save_project, text_batch

from hies_export import find_attention, prune_units
from hies_export.cli.main import main
from hies_export.errors import RecipeError
from hies_export.evaluate.interval import FAILURES
from hies_export.evaluate.metrics import quality_loss
from hies_export.forms.form import Form
from hies_export.forms.formats import Exporter, Given
from hies_export.forms.latency import TimedCut, TimedOn, latency_table
from hies_export.pipeline.recipe import PruneSection, PruningRecipe
from hies_export.pipeline.search import largest
from hies_export.recipe.sections import ExportSection
from hies_export.score.criteria import Scores
from hies_export.select.constraints import bundle_count
from hies_export.select.cost import CostTable
from hies_export.select.select import select_units
from hies_export.slim.bundles import cut_bundles, flops_table
from hies_export.units.counts import count_flops


def test_flops_are_what_the_counter_says_of_the_cut() -> None:
    model, batch = bert(), text_batch(2, 12, padding=False, labels=False)
    sites = find_attention(model, batch)
    table = flops_table(model, sites, batch=batch)
    scores = Scores("hies", {}, {site.name: torch.rand(6, dtype=torch.float64) for site in sites})
    plan = plan_of(scores, sites, counts=[1, 3, 5])
    measured = count_flops(prune_units(model, plan, sites), batch) / count_flops(model, batch)
    assert table.ratio(dict(zip(table.saved, [1, 3, 5], strict=True))) == pytest.approx(measured, abs=1e-12)
    assert 0.5 < measured < 0.8

    kept = select_units(scores, sites, table=table, ratio=0.8)
    slim = prune_units(model, kept, sites)
    assert count_flops(slim, batch) / count_flops(model, batch) <= 0.8
    # All heads cost the same here, so the best selection is that of the number of heads that fits.
    assert kept == select_units(scores, sites, heads=sum(len(k.removed) for k in kept.values()) / 18)


@pytest.mark.parametrize("unit", ["group", "query"])
def test_a_cut_by_counts_has_the_shapes_of_a_chosen_one(unit: str) -> None:
    """Grouped-query attention, uneven over the layers: as many heads, in as many groups, as `select_units` keeps."""
    model = causal_lm()
    batch = {"input_ids": torch.randint(5, 30, (2, 9))}
    sites = find_attention(model, batch)
    assert all(site.group_size > 1 for site in sites)
    removed = {site.name: index % bundle_count(site, unit) for index, site in enumerate(sites)}
    scores = Scores("hies", {}, {site.name: torch.rand(site.units, dtype=torch.float64) for site in sites})
    plan = plan_of(scores, sites, counts=list(removed.values()), unit=unit)
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in slim.named_parameters()}
        for slim in (cut_bundles(model, sites, removed, unit=unit), prune_units(model, plan, sites))
    ]
    assert shapes[0] == shapes[1] != {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    table = flops_table(model, sites, batch=batch, unit=unit)
    measured = count_flops(prune_units(model, plan, sites), batch) / count_flops(model, batch)
    assert table.ratio(removed) == pytest.approx(measured, abs=1e-12)


@pytest.mark.parametrize("right", range(9))
@pytest.mark.parametrize("known", [0, 2])
def test_bisection_finds_the_last_that_passes(right: int, known: int) -> None:
    tried: list[int] = []

    def passes(step: int) -> bool:
        tried.append(step)
        assert 1 <= step <= 8
        return step <= right

    assert largest(8, passes, at_least=known) == max(right, known)
    assert len(tried) <= 5
    exact = tried.copy()
    tried.clear()
    assert max(right, known) - 2 < largest(8, passes, at_least=known, within=2) <= max(right, known)
    assert exact[: len(tried)] == tried


@pytest.mark.parametrize(("sizes", "most"), [(1, 1), (8, 6), (100, 14)])
def test_a_search_by_few_failures_finds_the_last_that_passes(sizes: int, most: int) -> None:
    for near in range(1, sizes + 1):
        for right in range(sizes + 1):
            tried: list[int] = []

            def passes(step: int, tried: list[int] = tried, right: int = right) -> bool:
                tried.append(step)
                assert 1 <= step <= sizes
                return step <= right

            assert largest(sizes, passes, near=near, failures=FAILURES) == right
            assert tried[0] == max(1, round(0.9 * near))
            assert sum(step > right for step in tried) <= FAILURES
            assert len(set(tried)) == len(tried)
            assert len(tried) <= most


def test_a_drop_is_what_got_worse() -> None:
    assert quality_loss("accuracy", 0.88, 0.87) == 0.01
    assert quality_loss("accuracy", 0.88, 0.89) == -0.01
    assert quality_loss("perplexity", 6.5, 7.0) == 0.5


# By the last of the timed cuts: how far its interval reaches on each side, and the control's interval.
NOISE = {
    "calm": (0.039, (0.99, 1.01), False),
    "wide": (0.041, (0.99, 1.01), True),
    "a control that misses 1": (0.039, (1.03, 1.05), True),
}


@pytest.mark.parametrize(("reach", "control", "noisy"), NOISE.values(), ids=NOISE)
def test_a_timed_table_is_kept_unless_it_is_noisy(
    reach: float,
    control: tuple[float, float],
    noisy: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    ratios = [0.9, 0.8, 0.65, 0.6]
    ends = [(0.01, (0.99, 1.01))] * 3 + [(reach, control)]
    timed = iter(
        [
            (SimpleNamespace(low=low, high=high), SimpleNamespace(ratio=r, low=r - far, high=r + far))
            for r, (far, (low, high)) in zip(ratios, ends, strict=True)
        ]
    )

    def compare(forms: list[Form], batches: Any, **_: Any) -> Any:
        assert ([form.runtime for form in forms], [*batches]) == (["torch", "torch"], [(2, 12)])
        return next(timed)

    monkeypatch.setattr("hies_export.forms.latency.time", compare)
    model, batch = bert(), text_batch(2, 12, padding=False, labels=False)
    sites = find_attention(model, batch)
    where = TimedOn("torch", batch, Exporter(ExportSection(), Given(batch)), repeats=6)
    table = latency_table(model, sites, where, cache=tmp_path)
    assert [(round(6 * point["kept"]), point["ratio"]) for point in table.measured] == [
        *((4, 0.9), (3, 0.8), (2, 0.65), (1, 0.6))
    ]
    assert ("too busy" in caplog.text) == noisy
    assert len(list(tmp_path.glob("*.json"))) == (0 if noisy else 1)
    # What all modules save at a timed cut is what was timed.
    for kept, ratio in zip((4, 3, 2, 1), ratios, strict=True):
        assert table.ratio(dict.fromkeys(table.saved, 6 - kept)) == pytest.approx(ratio)


def test_a_kept_table_is_read_for_the_same_model_and_shape_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A machine that calls nothing noisy keeps every table.
    monkeypatch.setattr("hies_export.forms.latency.is_noisy", lambda low, high: False)
    monkeypatch.setattr("hies_export.forms.latency.WIDEST_INTERVAL", 1e9)
    model = bert(num_hidden_layers=1)
    sites = find_attention(model, text_batch(2, 12, padding=False, labels=False))

    def table(tokens: int, dtype: str = "float32") -> CostTable:
        batch = text_batch(2, tokens, padding=False, labels=False)
        where = TimedOn("torch", batch, Exporter(ExportSection(dtype=dtype), Given(batch)), repeats=2)
        return latency_table(model, sites, where, cache=tmp_path)

    first, kept = table(12), [(12,), (13,), (13, "float16")]
    assert table(12) == first
    for number, key in enumerate(kept, start=1):
        table(*key)
        assert len(list(tmp_path.glob("*.json"))) == number
    file = next(tmp_path.glob("*.json"))
    file.write_text("not json")
    for key in kept:
        table(*key)
    assert "not json" not in file.read_text()


def test_times_are_used_where_they_cannot_be_cached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ratios = [0.6, 0.7, 0.8, 0.9]
    cuts = [TimedCut(kept / 6, ratio, ratio, ratio, 1.0, 1.0) for kept, ratio in enumerate(ratios, start=1)]
    monkeypatch.setattr("hies_export.forms.latency._time_cuts", lambda *_, **__: cuts)
    (file := tmp_path / "cache").write_text("no folder")
    model, batch = bert(), text_batch(2, 12, padding=False, labels=False)
    where = TimedOn("torch", batch, Exporter(ExportSection(), Given(batch)))
    table = latency_table(model, find_attention(model, batch), where, cache=file)
    assert [cut["ratio"] for cut in table.measured] == ratios
    assert "could not be cached" in caplog.text


@pytest.mark.parametrize(
    ("budget", "message"),
    [
        ({"latency": {"ratio": 1.1}}, "(?s)latency.ratio.*less than 1"),
        ({"latency": {"ratio": 0.9, "runtime": "torsh"}}, "got 'torsh'; did you mean 'torch'"),
        ({"keep": {"metric": "accurcy", "by": 0.01}}, "got 'accurcy'; did you mean 'accuracy'"),
        ({"keep": {"metric": "accuracy", "by": -0.01}}, "(?s)keep.by.*greater than or equal to 0"),
    ],
)
def test_budgets_that_cannot_be_are_refused(budget: dict[str, Any], message: str) -> None:
    data = {"files": {"train": "a.jsonl"}, "text": "sentence"}
    with pytest.raises(RecipeError, match=message):
        PruningRecipe(model="m", task="text-classification", data=data, prune={"budget": budget})
    with pytest.raises(ValueError, match=message):
        PruneSection(budget=budget)  # type: ignore[arg-type]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return save_project(
        tmp_path,
        train=60,
        validation=20,
        calibration={"samples": 8, "batch_size": 8},
        prune={"alpha": 0.5, "budget": {}},
        measure={"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 4},
    )


# As in the paper, in place of what a budget of another kind asks for.
HEADS = ("prune.modules=[attention]", "prune.criterion=hies", "prune.compensation=null")


def run(project: Path, budget: dict[str, Any], *settings: str) -> int:
    extra = [part for setting in settings for part in ("--set", setting)]
    return main(["run", str(project / "recipe.yaml"), "--set", f"prune.budget={json.dumps(budget)}", *extra])


def report_of(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    report = json.loads((folder / "report.json").read_text())
    return report, report["details"]["outcome"]


@pytest.mark.usefixtures("untraced")
def test_a_run_by_flops_with_alpha_chosen(project: Path) -> None:
    assert run(project, {"flops": 0.9}, "prune.alpha=auto") == 0
    report, outcome = report_of(project / "out")
    found = outcome["found"]["value"]
    assert found == pytest.approx(outcome["predicted"], abs=1e-9)
    assert found == report["flops"]["slim"] / report["flops"]["dense"]
    assert 0.86 < found <= 0.9


@pytest.mark.usefixtures("untraced")
def test_a_run_by_time_says_predicted_and_measured(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiny models take their time elsewhere; a table as it might be timed stands in the cache's place.
    cuts = [
        TimedCut(k, r, ratio_low=r, ratio_high=r, control_low=1, control_high=1) for k, r in ((0.5, 0.8), (1 / 6, 0.7))
    ]
    monkeypatch.setattr("hies_export.forms.latency._read", lambda file, key: cuts)
    latency = {"ratio": 0.85, "runtime": "torch", "batch": 3, "sequence": 20}
    assert run(project, {"latency": latency}) == 0
    report, outcome = report_of(project / "out")
    assert 0.8 < outcome["predicted"] <= 0.85
    row = next(r for r in report["latency"] if (r["batch"], r["sequence"]) == (3, 20))
    assert outcome["found"] == {"value": row["ratio"]}
    assert run(project, {"latency": latency | {"ratio": 0.6}}, f"output={project / 'other'}") == 2
    assert not (project / "other").exists()
