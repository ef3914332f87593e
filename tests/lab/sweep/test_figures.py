"""Tables and the frontier of sweeps over FLOPs and measured time, on rows made by hand."""

import itertools
import statistics
from typing import Any

from support.sweeps import sweep_row

from hies_lab.sweep.charts import line_styles, sweep_frontier
from hies_lab.sweep.results import render_markdown, sweep_tables

MODULES = ("attention", "mlp", "attention+mlp")


def timed_rows(criteria: tuple[str, ...]) -> list[dict[str, Any]]:
    """Return rows in which time is a tenth above the share of FLOPs, and stability that share and a bit by seed."""
    fields = itertools.product(("scalars", "weighted"), criteria, MODULES, (0.8, 0.6), (0, 1))
    return [
        sweep_row(
            criterion, modules=modules, compensation=compensation, seed=seed, heads_removed=None, flops_ratio=None
        )
        | {"flops_target": flops, "quality": flops, "stability": flops + 0.02 * seed}
        | {"latency_ratio": flops + 0.1, "latency_low": flops + 0.05, "latency_high": flops + 0.2}
        for compensation, criterion, modules, flops, seed in fields
    ]


def test_agreement_against_time_has_a_point_per_method_and_budget_and_the_frontier() -> None:
    found = [
        row | {"latency_ratio": row["latency_ratio"] + 0.01 * row["seed"]} for row in timed_rows(("fisher", "kwon"))
    ]
    # Another method is slower and keeps more, one is too noisy to compare.
    found += [row | {"criterion": "slow", "latency_ratio": 0.95, "stability": 0.96} for row in found[:2]]
    found += [row | {"criterion": "noisy", "latency_noisy": True, "stability": 1.0} for row in found[:2]]
    figure = sweep_frontier(found, line_styles(found))
    assert figure is not None
    means: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in found:
        if not row.get("latency_noisy"):
            key = row["criterion"], row["modules"], row["compensation"], row["flops_target"]
            means.setdefault(key, []).append((row["latency_ratio"], row["stability"]))
    points = [(1.0, 1.0), *(tuple(map(statistics.fmean, zip(*values, strict=True))) for values in means.values())]
    assert len(figure.found) == len(points) == 1 + 2 * 2 * 3 * 2 + 1
    best = {
        (round(time, 6), round(same, 6))
        for time, same in points
        if not any(t <= time and s >= same and (t < time or s > same) for t, s in points)
    }
    line = [figure.found[number] for number in figure.best]
    assert {(round(one.time, 6), round(one.same, 6)) for one in line} == best
    # Those have names and intervals, the others neither.
    assert [one for one in figure.found if one.name] == sorted(line, key=figure.found.index)
    assert len(line) == len(best) == 4
    assert {"".join(one.series[:1]) for one in figure.found} == {"", *line_styles(found)} - {
        name for name in line_styles(found) if name.startswith("noisy")
    }
    assert sweep_frontier([row | {"latency_ratio": None} for row in found], line_styles(found)) is None


def test_tables_have_a_column_per_share_of_flops_and_a_row_per_size_that_the_grid_gave() -> None:
    # How many rows reach the tokens that `compensated` takes differs by seed.
    found = [row | {"calibration_samples": 8 + row["seed"]} for row in timed_rows(("fisher", "compensated"))]
    text = render_markdown(sweep_tables(found))
    assert "| FLOPs left | 80% | 60% |" in text
    assert "| compensated (neurons only) + scalars | <u>81.00</u> ± 1.41 | <u>61.00</u> ± 1.41 |" in text
    assert "fisher (neurons only, 8 samples) + scalars" in text
