"""Draw the figures of a sweep as PNG and SVG. Needs matplotlib, the extra `plots`."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..baselines.names import OWN_SAMPLES
from ..errors import RequestError
from ..files import read_json
from ..kinds import ATTENTION
from ..report.schemas import SWEEP, SWEEP_DETAILS, SweepFigures, SweepFile
from ..report.style import COLOURS, MARKERS, head_grid, head_map, new_figure, require_matplotlib, write_figures
from .tables import (
    COMPENSATIONS,
    budget_name,
    budget_of,
    budgets_of,
    grouped,
    line_name,
    of_first_size,
    percent,
)

Row = Mapping[str, Any]

DASHES = {"attention": ":", "mlp": "--", "attention+mlp": "-"}


def draw_figures(folder: Path, into: Path | None = None) -> list[Path]:
    """Draw the figures of a sweep.

    A figure without data is left out: `calibration-size` needs two sizes, `seeds` two seeds, `alpha-sensitivity` three
    given alphas, `head-maps` the criterion his or hies, and `quality-latency` and `stability-latency` measured times.

    Args:
        folder: Folder that `sweep` wrote; sweep.json and details.json are read.
        into: Where to write; by default `figures/` in that folder.

    Returns:
        Paths of the files that were written.

    Raises:
        MissingRuntimeError: matplotlib is not installed.
        RequestError: The folder holds no finished sweep.
    """
    require_matplotlib()
    for name in ("sweep.json", "details.json"):
        if not (folder / name).is_file():
            raise RequestError(f"figures are drawn from a finished sweep, but {folder} has no {name}")
    rows = read_json(folder / "sweep.json", SweepFile, SWEEP)
    details = read_json(folder / "details.json", SweepFigures, SWEEP_DETAILS)
    drawings: dict[str, Callable[[], Any]] = {
        "quality": lambda: curves(rows, "quality"),
        "stability": lambda: curves(rows, "stability"),
        "quality-latency": lambda: latency_curves(rows, "quality"),
        "stability-latency": lambda: latency_curves(rows, "stability"),
        "head-maps": lambda: head_maps(details),
        "importance-3d": lambda: importance_bars(details),
        "alpha-sensitivity": lambda: alpha_sensitivity(rows),
        "calibration-size": lambda: calibration_sizes(rows),
        "seeds": lambda: seeds(rows),
    }
    return write_figures(drawings, into or folder / "figures")


def curves(rows: Sequence[Row], quantity: str) -> Any:
    """Draw "quality" or "stability" against the budget.

    There is a panel per compensation and a line per method. Bands are one standard deviation over seeds.
    """
    shown = _not_too_many(of_first_size(rows))
    panels = list(dict.fromkeys(r["compensation"] for r in shown))
    figure = new_figure(1.2 + 4.2 * len(panels), 4.4)
    axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
    styles = _styles(shown)
    for axis, compensation in zip(axes, panels, strict=True):
        for name, style in styles.items():
            chosen = [r for r in shown if r["compensation"] == compensation and line_name(r, shown) == name]
            _line(axis, chosen, quantity, name, style)
        if quantity == "quality":
            axis.axhline(rows[0]["quality_dense"] * _scale(rows), color="#555555", linestyle=":", label="dense model")
        axis.set_title(COMPENSATIONS[compensation])
        _budget_axis(axis, rows)
    axes[0].set_ylabel(_axis_name(rows, quantity))
    # Below the panels, where the legend covers no line. Two columns of names with modules fit below a panel.
    columns = 4 if len({r.get("modules") for r in shown}) == 1 else min(4, 2 * len(panels))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    return figure


def latency_curves(rows: Sequence[Row], quantity: str) -> Any:
    """Draw "quality" or "stability" against the measured time, as a share of the dense model's.

    There is a panel per compensation, and a line per method and what it removes: heads only, neurons only or both. A
    point is the mean over seeds of a budget. Vertical bars are one standard deviation over seeds, and horizontal ones
    the mean 95 % interval of the time. None if nothing was timed.
    """
    timed = [r for r in of_first_size(rows) if r.get("latency_ratio") is not None]
    if not timed:
        return None
    shown = _not_too_many(timed)
    panels = list(dict.fromkeys(r["compensation"] for r in shown))
    figure = new_figure(1.2 + 4.2 * len(panels), 4.6)
    axes = figure.subplots(1, len(panels), sharex=True, sharey=True, squeeze=False)[0]
    styles = _styles(shown)
    for axis, compensation in zip(axes, panels, strict=True):
        for name, style in styles.items():
            chosen = [r for r in shown if r["compensation"] == compensation and line_name(r, shown) == name]
            _timed_line(axis, chosen, quantity, {"label": name, **style})
        if quantity == "quality":
            axis.axhline(rows[0]["quality_dense"] * _scale(rows), color="#555555", linestyle=":", label="dense model")
        axis.set_title(COMPENSATIONS[compensation])
        axis.set_xlabel("measured time, % of dense")
    axes[0].invert_xaxis()  # shared: deeper cuts are on the right
    axes[0].set_ylabel(_axis_name(rows, quantity))
    # Two columns of the longest names fit below a panel.
    columns = min(3, 2 * len(panels))
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=columns, frameon=False)
    return figure


def _timed_line(axis: Any, rows: Sequence[Row], quantity: str, style: Mapping[str, Any]) -> None:
    """Draw one method against its measured times; see `latency_curves`."""
    if not rows:
        return
    scale = 100.0 if quantity == "stability" else _scale(rows)
    x, y, across, along = [], [], [], []
    for budget in budgets_of(rows):
        alike = [r for r in rows if budget_of(r) == budget]
        time, low, high = (
            100 * statistics.fmean(r[name] for r in alike) for name in ("latency_ratio", "latency_low", "latency_high")
        )
        values = [r[quantity] * scale for r in alike]
        value, spread = statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0
        x.append(time)
        y.append(value)
        across.append((time - low, high - time))
        shares = quantity == "stability"
        along.append((min(spread, value), min(spread, 100 - value)) if shares else (spread, spread))
    bars: Any = {"xerr": list(zip(*across, strict=True)), "yerr": list(zip(*along, strict=True))}
    axis.errorbar(x, y, **bars, elinewidth=0.8, capsize=2, **style)


def head_maps(details: Mapping[str, Any]) -> Any:
    """Draw HIS (first row) and HIES (second row) of every head as maps.

    There is a column per budget, with crosses on the removed heads. None if the sweep has neither criterion.
    """
    plans = {name: _plans_of(details, name) for name in ("his", "hies")}
    kinds = [name for name in plans if plans[name]]
    if not kinds:
        return None
    columns = max(len(plans[name]) for name in kinds)
    modules = list(details["entropy"])  # attention only
    heads = max(len(details["his"][name]) for name in modules)
    width, height = max(2.3, 0.2 * heads + 0.7), max(1.9, 0.2 * len(modules) + 0.8)
    figure = new_figure(columns * width + 1.2, len(kinds) * height + 0.8)
    axes = figure.subplots(len(kinds), columns, squeeze=False)
    for line, kind in zip(axes, kinds, strict=True):
        for axis, plan in zip(line, plans[kind], strict=False):
            alpha = plan["alpha"] if kind == "hies" else None
            found = _importance(details, alpha)
            kept = {m: plan["kept"].get(m, range(len(found[m]))) for m in modules}
            removed = {m: [h for h in range(len(found[m])) if h not in kept[m]] for m in modules}
            label = "HIS" if alpha is None else f"HIES, α {alpha:g}"
            image = head_map(axis, found, removed, title=f"{label}: {_budget_text(plan)}")
        line[0].set_ylabel("layer")
    for axis in axes[-1]:
        axis.set_xlabel("head")
    figure.colorbar(image, ax=axes, label="score, 0 to 1 (x: removed)", fraction=0.03)
    return figure


def importance_bars(details: Mapping[str, Any]) -> Any:
    """Draw HIS and HIES of every head as 3D bars over layer and head."""
    modules = list(details["entropy"])  # attention only
    plans = _plans_of(details, "hies")
    kinds = [("HIS", None)] + ([(f"HIES, α {plans[0]['alpha']:g}", plans[0]["alpha"])] if plans else [])
    import matplotlib as mpl
    from mpl_toolkits.mplot3d.art3d import Poly3DCollection  # noqa: F401  registers the projection

    colours = mpl.colormaps["cividis"]
    figure = new_figure(5.4 * len(kinds), 4.8)
    for number, (label, alpha) in enumerate(kinds):
        axis: Any = figure.add_subplot(1, len(kinds), number + 1, projection="3d")
        grid = head_grid(_importance(details, alpha))
        bars = [
            (layer, head, value)
            for layer, line in enumerate(grid)
            for head, value in enumerate(line)
            if not math.isnan(value)
        ]
        layers, positions, values = zip(*bars, strict=True)
        place = ([h - 0.35 for h in positions], [n - 0.35 for n in layers], [0.0] * len(bars))
        axis.bar3d(*place, 0.7, 0.7, values, color=[colours(v) for v in values], shade=True)
        axis.set(ylabel="layer", zlabel="score, 0 to 1", zlim=(0, 1), title=label)
        axis.set_xlabel("head", labelpad=10)
        axis.set_yticks(range(0, len(modules), max(1, len(modules) // 6)))
        axis.set_box_aspect(None, zoom=0.85)
        axis.view_init(elev=32, azim=-58)
    return figure


def alpha_sensitivity(rows: Sequence[Row]) -> Any:
    """Draw quality against the budget for the best, the median and the worst given alpha of HIES.

    Alphas are ranked by `weighted_area`. None for fewer than three given alphas.
    """
    from ..evaluate.metrics import higher_is_better
    from .choosing import weighted_area

    plain = [
        r
        for r in rows
        if r["criterion"] == "hies" and all(r.get(k) == rows[0].get(k) for k in ("compensation", "modules"))
    ]
    alphas = sorted({r["alpha"] for r in plain if r.get("alpha_by") == "given"})
    if len(alphas) < 3:
        return None
    by_alpha = {a: [r for r in plain if r["alpha"] == a and r.get("alpha_by") == "given"] for a in alphas}
    areas = {a: weighted_area(*_means(chosen, "quality")) for a, chosen in by_alpha.items()}
    ranked = sorted(alphas, key=lambda a: areas[a], reverse=higher_is_better(rows[0]["metric"]))
    figure = new_figure(6.0, 4.4)
    axis = figure.subplots()
    places = {"best": ranked[0], "median": ranked[len(ranked) // 2], "worst": ranked[-1]}
    for index, (place, alpha) in enumerate(places.items()):
        area = areas[alpha] * _scale(rows)
        _line(axis, by_alpha[alpha], "quality", f"{place}: α {alpha:g} (area {area:.1f})", _style(index))
    axis.axhline(rows[0]["quality_dense"] * _scale(rows), color="#555555", linestyle=":", label="dense model")
    axis.set_title(f"HIES, {len(alphas)} values of α")
    axis.set_ylabel(_axis_name(rows, "quality"))
    _budget_axis(axis, rows)
    axis.legend(frameon=False)
    return figure


def calibration_sizes(rows: Sequence[Row]) -> Any:
    """Draw stability against the number of calibration samples at the median budget; None for a single size."""
    shared = [r for r in rows if r["criterion"] not in OWN_SAMPLES]
    sizes = sorted({r["calibration_samples"] for r in shared})
    if len(sizes) < 2:
        return None
    budget = _middle(rows)
    at = [r for r in shared if budget_of(r) == budget and r["compensation"] == shared[0]["compensation"]]
    at = _not_too_many(at)
    figure = new_figure(6.0, 4.8)
    axis = figure.subplots()
    for name, style in _styles(at).items():
        chosen = [r for r in at if line_name(r, at) == name]
        _line(axis, chosen, "stability", name, style, at=lambda r: r["calibration_samples"])
    axis.set_xscale("log", base=2)
    axis.set_xticks(sizes, [str(size) for size in sizes])
    axis.set_xlabel("calibration samples")
    axis.set_ylabel(_axis_name(rows, "stability"))
    axis.set_title(_budget_title(rows, budget))
    figure.legend(*axis.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure


def seeds(rows: Sequence[Row]) -> Any:
    """Draw the stability of every seed at the median budget, with mean and standard deviation; None for one seed."""
    if len({r["seed"] for r in rows}) < 2:
        return None
    budget = _middle(rows)
    shown = grouped(of_first_size(rows), "stability")
    found = {name: values[budget] for name, values in shown.items() if budget in values}
    figure = new_figure(8.0, 1.3 + 0.34 * len(found))
    axis = figure.subplots()
    for place, values in enumerate(reversed(found.values())):
        shares = [100 * value for value in values]
        spread = statistics.stdev(shares) if len(shares) > 1 else 0.0
        axis.errorbar(statistics.fmean(shares), place, xerr=spread, fmt="|", color="#000000", capsize=4, markersize=12)
        axis.scatter(shares, [place] * len(shares), color=COLOURS[0], s=26, alpha=0.8, zorder=3)
    axis.set_yticks(range(len(found)), list(reversed(found)))
    axis.set_xlabel(_axis_name(rows, "stability"))
    axis.set_ylim(-0.7, len(found) - 0.3)
    axis.set_title(f"Every seed; {_budget_title(rows, budget)}")
    return figure


def _line(
    axis: Any,
    rows: Sequence[Row],
    quantity: str,
    name: str,
    style: Mapping[str, Any],
    *,
    at: Callable[[Row], float] = lambda row: 100 * budget_of(row),
) -> None:
    """Draw one method: means over seeds, with a band of one standard deviation.

    Args:
        axis: The axes of matplotlib.
        rows: Rows of the method.
        quantity: "quality" or "stability".
        name: Its label in the legend.
        style: Its colour and marker.
        at: Horizontal position of a row; by default its budget in percent.
    """
    if not rows:
        return
    scale = 100.0 if quantity == "stability" else _scale(rows)
    by_place: dict[float, list[float]] = {}
    for row in rows:
        by_place.setdefault(at(row), []).append(row[quantity] * scale)
    x = sorted(by_place)
    means = [statistics.fmean(by_place[place]) for place in x]
    spread = [statistics.stdev(v) if len(v := by_place[place]) > 1 else 0.0 for place in x]
    axis.plot(x, means, label=name, **style)
    lower, upper = ([m + sign * d for m, d in zip(means, spread, strict=True)] for sign in (-1, 1))
    if quantity == "stability":
        lower, upper = [max(v, 0.0) for v in lower], [min(v, 100.0) for v in upper]
    axis.fill_between(x, lower, upper, color=style["color"], alpha=0.15, linewidth=0)


def _styles(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the style of every line by its name, in the order of the rows.

    Several methods that remove several kinds of units have a colour per method and a dash per kind.
    """
    lines = {line_name(r, rows): (line_name(r, [r]), str(r.get("modules", ATTENTION))) for r in rows}
    methods, modules = (list(dict.fromkeys(part)) for part in zip(*lines.values(), strict=True))
    if len(methods) == 1 or len(modules) == 1:
        return {name: _style(index) for index, name in enumerate(lines)}
    return {
        name: _style(methods.index(method)) | {"linestyle": DASHES[kinds], "marker": MARKERS[modules.index(kinds)]}
        for name, (method, kinds) in lines.items()
    }


def _style(index: int) -> dict[str, Any]:
    """Return colour and marker of a line by its number; beyond the number of colours, lines are dashed."""
    again, place = divmod(index, len(COLOURS))
    dashed = {"linestyle": "--", "markerfacecolor": "white"} if again else {}
    return {"color": COLOURS[place], "marker": MARKERS[place], **dashed}


def _not_too_many(rows: Sequence[Row]) -> list[Row]:
    """Return all rows; without those of given alphas if there are more methods than colours."""
    chosen = [r for r in rows if r.get("alpha_by") != "given"]
    return chosen if chosen and len({line_name(r, rows) for r in rows}) > len(COLOURS) else list(rows)


def _means(rows: Sequence[Row], quantity: str) -> tuple[list[float], list[float]]:
    """Return the shares removed, ascending, and the mean of a quantity over the rows of each."""
    of_flops = budget_name(rows) == "FLOPs left"
    budgets = budgets_of(rows)
    means = [statistics.fmean(r[quantity] for r in rows if budget_of(r) == budget) for budget in budgets]
    return [1 - budget if of_flops else budget for budget in budgets], means


def _middle(rows: Sequence[Row]) -> float:
    """Return the median budget; of an even number the deeper cut of the middle two."""
    budgets = budgets_of(rows)
    return budgets[len(budgets) // 2]


def _scale(rows: Sequence[Row]) -> float:
    return percent(rows[0]["metric"])


def _axis_name(rows: Sequence[Row], quantity: str) -> str:
    if quantity == "stability":
        return "stability: predictions kept, %"
    return rows[0]["metric"].replace("_", " ").capitalize() + (" x 100" if _scale(rows) > 1 else "")


def _budget_axis(axis: Any, rows: Sequence[Row]) -> None:
    """Label the horizontal axis; deeper cuts are on the right."""
    budgets, name = budgets_of(rows), budget_name(rows)
    axis.set_xticks([100 * budget for budget in budgets], [f"{100 * budget:g}" for budget in budgets])
    axis.set_xlabel(f"{name}, %")
    if name == "FLOPs left" and not axis.xaxis_inverted():
        axis.invert_xaxis()


def _budget_title(rows: Sequence[Row], budget: float) -> str:
    """Return a budget in words."""
    return f"{budget:.0%} of the {'FLOPs left' if budget_name(rows) == 'FLOPs left' else 'heads removed'}"


def _budget_text(plan: Mapping[str, Any]) -> str:
    """Return the budget of a plan in few words."""
    flops = plan.get("flops_target")
    return f"{plan['sparsity']:.0%} removed" if flops is None else f"{flops:.0%} of the FLOPs"


def _plans_of(details: Mapping[str, Any], criterion: str) -> list[Mapping[str, Any]]:
    """Return the plans of a criterion that remove heads, one per budget, the smallest cut first.

    Of several alphas, or modules, the first.
    """
    found: dict[float, Mapping[str, Any]] = {}
    for plan in details["plans"]:
        if plan["criterion"] == criterion and plan.get("modules") != "mlp":
            flops = plan.get("flops_target")
            found.setdefault(plan["sparsity"] if flops is None else 1 - flops, plan)
    return [found[removed] for removed in sorted(found)]


def _importance(details: Mapping[str, Any], alpha: float | None) -> Mapping[str, list[float]]:
    """Return HIS or, with an alpha, HIES of every head by module, from statistics scaled to [0, 1] over the model."""

    def spread(values: Mapping[str, list[float]]) -> dict[str, list[float]]:
        everything = [v for line in values.values() for v in line]
        low, high = min(everything), max(everything)
        width = high - low
        return {name: [(v - low) / width if width else 0.0 for v in line] for name, line in values.items()}

    entropy = spread(details["entropy"])
    his = spread({name: details["his"][name] for name in entropy})
    if alpha is None:
        return his
    return {
        name: [alpha * h + (1 - alpha) * (1 - e) for h, e in zip(his[name], entropy[name], strict=True)] for name in his
    }
