"""Budgets of FLOPs, time and quality: against brute force, the counter, the masked model and a run."""

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.models import bert, causal_lm, save_project, text_batch
from support.runs import hies

from hies_export import find_attention, prune_units
from hies_export.evaluate.interval import FAILURES
from hies_export.evaluate.metrics import quality_loss
from hies_export.forms.form import Form
from hies_export.forms.formats import Exporter, Given
from hies_export.forms.latency import TimedCut, TimedOn, latency_table
from hies_export.pipeline.search import largest
from hies_export.recipe.sections import ExportSection
from hies_export.select.constraints import bundle_count, ranked_bundles
from hies_export.slim.bundles import cut_bundles


@pytest.mark.parametrize("unit", ["group", "query"])
def test_a_cut_by_counts_has_the_shapes_of_a_chosen_one(unit: str) -> None:
    """Grouped-query attention, uneven over the layers: as many heads and groups as without the worst bundles."""
    model = causal_lm()
    sites = find_attention(model, {"input_ids": torch.randint(5, 30, (2, 9))})
    assert all(site.group_size > 1 for site in sites)
    removed = {site.name: index % bundle_count(site, unit) for index, site in enumerate(sites)}
    selection = {
        site.name: site.kept(
            set(range(site.units)).difference(
                *(units for _, units in ranked_bundles(torch.rand(site.units), site, unit)[: removed[site.name]])
            )
        )
        for site in sites
    }
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in slim.named_parameters()}
        for slim in (cut_bundles(model, sites, removed, unit=unit), prune_units(model, selection, sites))
    ]
    assert shapes[0] == shapes[1] != {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def tracked(right: int, most: int) -> tuple[Callable[[int], bool], list[int]]:
    """Return what passes up to a step, and the steps that it was asked for."""
    tried: list[int] = []

    def passes(step: int) -> bool:
        tried.append(step)
        assert 1 <= step <= most
        return step <= right

    return passes, tried


@pytest.mark.parametrize("known", [0, 2])
def test_bisection_finds_the_last_that_passes(known: int) -> None:
    for right in range(9):
        passes, exact = tracked(right, 8)
        assert largest(8, passes, at_least=known) == max(right, known)
        assert len(exact) <= 5
        passes, tried = tracked(right, 8)
        assert max(right, known) - 2 < largest(8, passes, at_least=known, within=2) <= max(right, known)
        assert exact[: len(tried)] == tried


@pytest.mark.parametrize(("sizes", "most"), [(1, 1), (8, 6), (100, 14)])
def test_a_search_by_few_failures_finds_the_last_that_passes(sizes: int, most: int) -> None:
    for near, right in itertools.product(range(1, sizes + 1), range(sizes + 1)):
        passes, tried = tracked(right, sizes)
        assert largest(sizes, passes, near=near, failures=FAILURES) == right
        assert tried[0] == max(1, round(0.9 * near))
        assert sum(step > right for step in tried) <= FAILURES
        assert len(set(tried)) == len(tried) <= most


def test_a_drop_is_what_got_worse() -> None:
    assert quality_loss("accuracy", 0.88, 0.87) == 0.01
    assert quality_loss("accuracy", 0.88, 0.89) == -0.01
    assert quality_loss("perplexity", 6.5, 7.0) == 0.5


@pytest.mark.parametrize("noisy", [False, True])
def test_a_table_has_the_timed_ratios_and_a_noisy_control_is_warned_of(
    noisy: bool, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    ratios = [0.9, 0.8, 0.65, 0.6]
    found = iter(zip(ratios, [False, noisy, False, False], strict=True))

    def compare(forms: list[Form], batches: Any, **_: Any) -> Any:
        assert ([form.runtime for form in forms], [*batches]) == (["torch", "torch"], [(2, 12)])
        ratio, of_control = next(found)
        slim = SimpleNamespace(ratio=ratio, ratio_low=ratio - 0.01, ratio_high=ratio + 0.01)
        return [[SimpleNamespace(noisy=of_control)], [slim]]

    monkeypatch.setattr("hies_export.forms.latency.time", compare)
    model, batch = bert(), text_batch(2, 12, padding=False, labels=False)
    where = TimedOn("torch", batch, Exporter(ExportSection(), Given(batch)), repeats=6)
    table = latency_table(model, find_attention(model, batch), where)
    points = [(round(6 * point["kept"]), point["ratio"]) for point in table.measured]
    assert points == [*zip((4, 3, 2, 1), ratios, strict=True)]
    assert ("too busy" in caplog.text) == noisy
    # What all modules save at a timed cut is what was timed.
    for kept, ratio in points:
        assert table.ratio(dict.fromkeys(table.saved, 6 - kept)) == pytest.approx(ratio)


@pytest.mark.usefixtures("untraced")
def test_a_run_by_time_says_predicted_and_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Tiny models take their time elsewhere, so these are cuts as they might be timed.
    cuts = [TimedCut(kept, ratio, ratio, ratio, "attention") for kept, ratio in ((0.5, 0.8), (1 / 6, 0.7))]
    monkeypatch.setattr("hies_export.forms.latency._time_cuts", lambda *_, **__: cuts)
    latency = {"ratio": 0.85, "runtime": "torch", "batch": 3, "sequence": 20}
    save_project(
        tmp_path,
        train=24,
        validation=20,
        calibration={"samples": 8, "batch_size": 8},
        prune={"modules": ["attention"], "criterion": "his", "compensation": None, "budget": {"latency": latency}},
        measure={"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 2},
    )
    assert hies("run", tmp_path / "recipe.yaml") == 0
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    outcome = report["details"]["outcome"]
    assert 0.8 < outcome["predicted"] <= 0.85
    row = next(r for r in report["latency"] if (r["batch"], r["sequence"]) == (3, 20))
    assert outcome["found"] == {"value": row["ratio"]}
    unreachable = ("--set", "prune.budget.latency.ratio=0.6", "--set", f"output={tmp_path / 'other'}")
    assert hies("run", tmp_path / "recipe.yaml", *unreachable) == 2
    assert not (tmp_path / "other").exists()
