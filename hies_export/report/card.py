"""The card (README.md) of a slim checkpoint, in its folder and on the Hub."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCardData, hf_hub_download, metadata_load
from huggingface_hub.errors import HfHubHTTPError

from .latency import latency_note, latency_table
from .report import (
    Report,
    budget_text,
    comparison_rows,
    criterion_text,
    how_measured,
    markdown_head_map,
    markdown_table,
    model_name,
    title,
)

# What a card hands down to those of the models made from it.
LICENSE_KEYS = ("license", "license_name", "license_link")

ORT_CLASSES = {
    "text-classification": "ORTModelForSequenceClassification",
    "image-classification": "ORTModelForImageClassification",
}


def render_card(
    report: Report,
    *,
    location: str = "slim",
    revision: str | None = None,
    origin: Mapping[str, Any] | None = None,
    images: Mapping[str, str] | None = None,
) -> str:
    """The README.md of a slim checkpoint.

    Args:
        report: Of the run that made it.
        location: What the checkpoint is loaded from: its folder, with the ONNX folder beside it, or a Hub id, with the
            ONNX folder in it.
        revision: Branch on the Hub, where it is not the main one.
        origin: `base_model` and the licence, as in the metadata of a card; see `read_card`.
        images: File -> what it shows.
    """
    note = (
        "Its layers have different numbers of heads, which a plain config cannot describe; `modeling_hies.py` beside "
        "the weights (it imports only torch and transformers) rebuilds the shapes. `hies_export.load` needs no remote "
        "code."
        if report.details.get("custom_code", False)
        else "It is a plain checkpoint: stock transformers loads it with no extra code."
    )
    parts = [
        f"---\n{card_metadata(report, origin or {}).to_yaml()}\n---",
        f"# {title(report)}",
        f"{report.heads['removed']} of the {report.heads['total']} attention heads of `{model_name(report)}` were "
        f"removed by hies_export ({criterion_text(report)}), without retraining. {note}",
        "## What it costs and gains",
        markdown_table(("", "dense", "slim", "change"), comparison_rows(report)),
        *([budget_text(report)] if budget_text(report) else []),
        *([markdown_table(*latency_table(report.latency)), latency_note(report.latency)] if report.latency else []),
        how_measured(report),
        *(f"![{shown}]({file})" for file, shown in (images or {}).items()),
        "## Load it",
        *_ways_to_load(report, location, revision),
        "## Heads",
        "Which heads went, by their original numbers, is in `hies_plan.json`:",
        markdown_head_map(report),
    ]
    return "\n\n".join(parts) + "\n"


def card_metadata(report: Report, origin: Mapping[str, Any]) -> ModelCardData:
    """The metadata at the top of the card.

    Source: https://huggingface.co/docs/hub/model-cards#model-card-metadata
    """
    data = report.details.get("data", {})
    names = report.details.get("metrics") or {report.quality["metric"]: report.quality}
    dataset, configuration = _dataset(data)
    results = [
        EvalResult(
            task_type=report.task,
            dataset_type=dataset,
            dataset_name=data.get("name") or data["file"],
            dataset_config=configuration,
            dataset_split=data["evaluation_split"],
            metric_type=name,
            metric_value=values["slim"],
        )
        for name, values in names.items()
        if dataset
    ]
    return ModelCardData(
        base_model=origin.get("base_model"),
        # Of the relations the Hub knows (adapter, finetune, merge, quantized) the one that is true of changed weights
        # in their own precision. Unless told, it takes a repository with ONNX files for a quantisation.
        base_model_relation="finetune" if origin.get("base_model") else None,
        library_name="transformers",
        pipeline_tag=report.task,
        tags=["hies-export", "pruning", "attention-heads"],
        datasets=dataset if data.get("name") else None,
        metrics=list(names),
        model_name=title(report) if results else None,
        eval_results=results or None,
        **{key: origin[key] for key in LICENSE_KEYS if origin.get(key)},
    )


def read_card(model: str | Path) -> dict[str, Any]:
    """The metadata of a model's card, from its folder or else from the Hub; empty where there is none."""
    try:
        file = Path(model) / "README.md" if Path(model).is_dir() else hf_hub_download(str(model), "README.md")
        return metadata_load(file) or {}
    except (HfHubHTTPError, OSError, ValueError, yaml.YAMLError):
        return {}


def _dataset(data: Mapping[str, Any]) -> tuple[str | None, str | None]:
    """Hub id and configuration of the data set; of files, the kind of file in the place of the id; None if unknown."""
    if data.get("name"):
        parts = data["name"].split("/")
        return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    if data.get("file"):
        return Path(data["file"].removesuffix(".gz")).suffix.removeprefix(".") or "imagefolder", None
    return None, None


def _ways_to_load(report: Report, location: str, revision: str | None) -> list[str]:
    """Three of them: by this package, by transformers alone, in ONNX Runtime."""
    of_revision = f', revision="{revision}"' if revision else ""
    remote = ", trust_remote_code=True" if report.details.get("custom_code", False) else ""
    auto_class = report.details.get("auto_class", "AutoModel")
    on_hub = "/" in location
    ways = {
        "With hies_export, which runs no code from the repository:": (
            f'import hies_export\n\nmodel = hies_export.load("{location}"{of_revision})'
        ),
        "With transformers alone:": (
            f"from transformers import {auto_class}\n\n"
            f'model = {auto_class}.from_pretrained("{location}"{of_revision}{remote})'
        ),
    }
    if report.task in ORT_CLASSES:
        name = ORT_CLASSES[report.task]
        where = f'"{location}"{of_revision}, subfolder="onnx"' if on_hub else '"onnx"'
        ways["In ONNX Runtime, with optimum-onnx:"] = (
            f"from optimum.onnxruntime import {name}\n\nmodel = {name}.from_pretrained({where})"
        )
    else:
        fetch = "from huggingface_hub import snapshot_download\n" if on_hub else ""
        where = (
            f'snapshot_download("{location}"{of_revision}, allow_patterns="onnx/*") + "/onnx"' if on_hub else '"onnx"'
        )
        ways["In ONNX Runtime, greedily:"] = (
            f"{fetch}from hies_export import OnnxGenerator\n\ngenerator = OnnxGenerator.from_folder({where})"
        )
    return [part for text, code in ways.items() for part in (text, f"```python\n{code}\n```")]
