"""The report: one JSON that the terminal table, the Markdown page and the model card are rendered from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..errors import RequestError
from ..values import PruningPlan, dump_json
from .latency import latency_note, latency_table
from .layers import layer_table

KEPT, CUT = "■", "·"


@dataclass(frozen=True)
class Report:
    """What a run did, cost and gained. The fields but `details` are the summary that outside programs read.

    Attributes:
        model: Path or Hub id of the dense model.
        task: Task of the recipe.
        criterion, alpha, seed: What the heads were chosen by; alpha is None where the criterion has none.
        heads: total, removed, kept_per_layer (query heads).
        parameters: Number of parameters: dense, slim.
        bytes: Size of the weights in bytes: dense and slim checkpoint, and the ONNX folder's graph and weights.
        flops: Floating-point operations of one forward pass: dense, slim, and the shape [batch, sequence].
        quality: metric, and its value for the dense and the slim model.
        stability: Share of evaluated samples whose prediction equals the dense model's.
        cut_max_abs: Largest difference between the cut and the masked model's output.
        reload_max_abs: Largest difference between the saved and the reloaded model's output.
        onnx_max_abs: Largest difference between the ONNX and the torch model's output.
        seconds: Time spent in score, cut, export, measure.
        latency: One row per runtime and shape.
        environment: Hardware and library versions the numbers were measured with.
        cache_bytes_per_token: What a token adds to the key/value cache, in bytes: dense, slim; None without a cache.
        details: What the renderings show beyond the summary: plan, statistics, all metrics, data.
    """

    model: str
    task: str
    criterion: str
    alpha: float | None
    seed: int
    heads: Mapping[str, Any]
    parameters: Mapping[str, int]
    bytes: Mapping[str, int]
    flops: Mapping[str, Any]
    quality: Mapping[str, Any]
    stability: float
    cut_max_abs: float
    reload_max_abs: float
    onnx_max_abs: float
    seconds: Mapping[str, float]
    latency: Sequence[Mapping[str, Any]]
    environment: Mapping[str, Any]
    cache_bytes_per_token: Mapping[str, int] | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Everything but `details`, as plain values."""
        return {k: v for k, v in asdict(self).items() if k != "details"}

    def to_json(self) -> str:
        """The whole report as JSON text."""
        return dump_json(asdict(self))

    @classmethod
    def from_file(cls, path: str | Path) -> Report:
        """Read a report.json, or the one of a run's folder.

        Raises:
            RequestError: There is none.
        """
        path = Path(path)
        file = path / "report.json" if path.is_dir() else path
        try:
            values = json.loads(file.read_text(encoding="utf-8"))
            known = {f.name: f.name in values or f.default is MISSING for f in fields(cls)}
            return cls(**{name: values[name] for name, wanted in known.items() if wanted})
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RequestError(
                f"a report must be a report.json or a run's folder, but {path} is not ({error!r}); "
                "give the folder a run wrote"
            ) from error


def head_map(plan: PruningPlan) -> dict[str, str]:
    """Per attention module one mark per head: ■ kept, · cut."""
    return {
        name: "".join(KEPT if head in kept.query else CUT for head in range(kept.heads))
        for name, kept in plan.kept.items()
    }


def head_map_text(lines: Mapping[str, str]) -> Text:
    """A head map for the terminal: layers by heads."""
    text = Text()
    text.append("heads  ", style="bold")
    text.append(f"{KEPT} kept  ", style="green")
    text.append(f"{CUT} cut", style="red")
    for index, (name, line) in enumerate(lines.items()):
        text.append(f"\n  {index:>3}  ", style="dim")
        for mark in line:
            text.append(mark + " ", style="green" if mark == KEPT else "red")
        text.append(f" {line.count(KEPT):>2} of {len(line)}  {name}", style="dim")
    return text


def comparison_rows(report: Report) -> list[tuple[str, str, str, str]]:
    """(what, dense, slim, change) of everything that has a dense and a slim value."""
    metric, dense, slim = (report.quality[key] for key in ("metric", "dense", "slim"))
    batch, sequence = report.flops["shape"]
    total, removed = report.heads["total"], report.heads["removed"]
    before = report.details.get("uncompensated")
    return [
        ("attention heads", f"{total}", f"{total - removed}", _change(total, total - removed)),
        _row("parameters", report.parameters, ""),
        _row("checkpoint weights", report.bytes, "B"),
        _row(f"FLOPs at {batch} x {sequence}", report.flops, ""),
        *([_row("cache per token", report.cache_bytes_per_token, "B")] if report.cache_bytes_per_token else []),
        (metric, f"{dense:.4f}", f"{slim:.4f}", f"{slim - dense:+.4f}"),
        (agreement(report), "", f"{report.stability:.1%}", ""),
        *(
            [
                (f"{metric} before compensation", "", f"{before['metrics'][metric]:.4f}", ""),
                (f"{agreement(report)} before compensation", "", f"{before['stability']:.1%}", ""),
            ]
            if before
            else []
        ),
    ]


def budget_text(report: Report) -> str:
    """What the budget asked for and what came of it, in a sentence; empty for a share of the heads."""
    budget = report.details.get("budget", {})
    kind = budget.get("kind")
    if kind == "max_drop":
        metric, judged = budget["metric"], "refitted" if "refitted" in budget else "masked"
        return (
            f"Budget: {metric} may get worse by {budget['by']:g} on {budget['samples']} held-out samples. Dense "
            f"{budget['dense']:.4f}, {judged} {budget[judged]:.4f}, slim {budget['slim']:.4f}; {len(budget['judged'])} "
            "plans were tried."
        )
    if kind not in ("flops", "latency"):
        return ""
    what = "the FLOPs" if kind == "flops" else "the time"
    where = f" on {budget['runtime']} at {budget['batch']} x {budget['sequence']}" if kind == "latency" else ""
    off = abs(budget["measured"] - budget["predicted"])
    measured = "too noisy to measure" if budget.get("noisy") else f"measured {budget['measured']:.3f}"
    apart = "" if budget.get("noisy") or kind == "flops" else f", {100 * off:.1f} points apart"
    return (
        f"Budget: at most {budget['target']:g} of {what} of the dense model{where}. "
        f"Predicted {budget['predicted']:.3f}, {measured}{apart}."
    )


def print_report(report: Report, console: Console) -> None:
    """Print the head map and the tables on a terminal."""
    console.print()
    console.print(head_map_text(report.details["head_map"]))
    console.print()
    console.print(plain_table(("", "dense", "slim", "change"), comparison_rows(report)))
    if budget_text(report):
        console.print(f"\n{budget_text(report)}", markup=False)
    if report.latency:
        console.print()
        console.print(plain_table(*latency_table(report.latency)))
        console.print(latency_note(report.latency), style="dim")


def plain_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table for the terminal: no frame, the first column left, numbers right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left", no_wrap=bool(index))
    for row in rows:
        table.add_row(*row)
    return table


def render_markdown(report: Report) -> str:
    """The report as a Markdown page."""
    parts = [
        f"# {title(report)}",
        f"`{report.model}` · {report.task} · {criterion_text(report)} · seed {report.seed}",
        "## What changed",
        _markdown_table(("", "dense", "slim", "change"), comparison_rows(report)),
        *([budget_text(report)] if budget_text(report) else []),
        "## Heads",
        _markdown_head_map(report),
    ]
    if report.latency:
        parts += [
            "## Latency",
            _markdown_table(*latency_table(report.latency)),
            latency_note(report.latency),
        ]
    layers = layer_lines(report)
    if layers:
        batch, sequence = report.details["flops_per_layer"]["shape"]
        parts += [f"## FLOPs of every layer, at {batch} x {sequence}", _markdown_table(*layers)]
    parts += [
        "## Checks",
        _markdown_table(
            ("largest difference of any output", ""),
            [
                ("cut model against masked model", f"{report.cut_max_abs:.2g}"),
                ("reloaded checkpoint against saved model", f"{report.reload_max_abs:.2g}"),
                ("ONNX Runtime against torch", f"{report.onnx_max_abs:.2g}"),
            ],
        ),
        "## How it was measured",
        how_measured(report),
    ]
    return "\n\n".join(parts) + "\n"


def render_card(report: Report, *, folder_name: str = "slim") -> str:
    """The slim checkpoint's README.md: what it is, what it costs and gains, how to load it."""
    auto_class = report.details.get("auto_class", "AutoModel")
    custom = report.details.get("custom_code", False)
    remote = ", trust_remote_code=True" if custom else ""
    note = (
        "Its layers have different numbers of heads, which a plain config cannot describe; `modeling_hies.py` in this "
        "folder (it imports only torch and transformers) rebuilds the shapes. `hies_export.load` needs no remote code."
        if custom
        else "It is a plain checkpoint: stock transformers loads it with no extra code."
    )
    return "\n".join(
        [
            "---",
            "library_name: transformers",
            f"pipeline_tag: {report.task}",
            "tags: [hies-export, pruning, attention-heads]",
            "---",
            "",
            f"# {title(report)}",
            "",
            f"{report.heads['removed']} of the {report.heads['total']} attention heads of `{model_name(report)}` were "
            f"removed by hies_export ({criterion_text(report)}), without retraining. {note}",
            "",
            _markdown_table(("", "dense", "slim", "change"), comparison_rows(report)),
            "",
            "```python",
            f"from transformers import {auto_class}",
            "",
            f'model = {auto_class}.from_pretrained("{folder_name}"{remote})',
            "```",
            "",
            "or `hies_export.load(...)`. Which heads went is in `hies_plan.json`:",
            "",
            _markdown_head_map(report),
            "",
            how_measured(report),
            "",
        ]
    )


def agreement(report: Report) -> str:
    """What stability counts."""
    tolerance = report.details.get("stability_tolerance")
    what = report.details.get("stability_of", "prediction")
    return f"same {what}" if tolerance is None else f"same within {tolerance:g}"


def model_name(report: Report) -> str:
    """The Hub id, or the folder's name: what a card says must not depend on where a machine keeps its models."""
    path = Path(report.model)
    return path.name if path.is_absolute() or path.exists() else report.model


def title(report: Report) -> str:
    """The report's headline."""
    return f"{model_name(report)}, {report.heads['removed'] / report.heads['total']:.0%} of its attention heads removed"


def criterion_text(report: Report) -> str:
    """What heads were chosen by."""
    refitted = ", output projections refitted in closed form" if report.details.get("compensation") else ""
    return report.criterion + ("" if report.alpha is None else f", alpha {report.alpha:g}") + refitted


def how_measured(report: Report) -> str:
    """Data and environment, in sentences."""
    data = report.details.get("data", {})
    lines = []
    if data:
        own = {"answer": "their answers", "next token": "their next tokens"}
        known = own.get(report.details.get("stability_of", ""), "their labels")
        labels = known if data["labels"] == "data" else "the model's own predictions as labels"
        asked, used = data.get("calibration_batch_asked", 0), data.get("calibration_batch", 0)
        halved = f" ({used} at once: {asked} did not fit into memory)" if used < asked else ""
        lines.append(
            f"Heads were scored on {data['calibration_samples']} samples{halved} with {labels}; quality is over "
            f"{data['evaluation_samples']} samples of {data['evaluation_split']}."
        )
    lines.append(environment_text(report.environment))
    return " ".join(lines)


def environment_text(environment: Mapping[str, Any]) -> str:
    """Hardware and the libraries that matter, in a sentence."""
    names = {
        **{name: name for name in ("cpu", "gpu", "torch", "cuda", "transformers", "onnxruntime")},
        **{"onnxruntime_gpu": "onnxruntime-gpu", "gpu_driver": "driver"},
    }
    return ", ".join(f"{shown} {environment[name]}" for name, shown in names.items() if environment.get(name)) + "."


def layer_lines(report: Report) -> tuple[list[str], list[list[str]]] | None:
    """Header and lines of the FLOPs of every layer; None for the report of an older run."""
    layers = report.details.get("flops_per_layer")
    return layer_table(layers["dense"], layers["slim"]) if layers else None


def _markdown_head_map(report: Report) -> str:
    lines = [
        f"{index:>3}  {' '.join(line)}  {line.count(KEPT)}/{len(line)}"
        for index, line in enumerate(report.details["head_map"].values())
    ]
    return "\n".join(["```text", f"{KEPT} kept  {CUT} cut", *lines, "```"])


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    return "\n".join(lines + ["| " + " | ".join(row) + " |" for row in rows])


def _row(name: str, values: Mapping[str, Any], unit: str) -> tuple[str, str, str, str]:
    dense, slim = values["dense"], values["slim"]
    return (name, f"{si(dense)}{unit}", f"{si(slim)}{unit}", _change(dense, slim))


def si(number: float) -> str:
    """Three significant digits and an SI prefix."""
    power = min(max(0, (len(str(int(number))) - 1) // 3), 4)
    scaled = number / 1000**power
    return f"{scaled:.{max(0, 3 - len(str(int(scaled))))}f} {' kMGT'[power]}".rstrip() + " " * (power == 0)


def _change(dense: float, slim: float) -> str:
    return f"{(slim - dense) / dense:+.1%}"
