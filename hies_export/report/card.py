"""README.md: the card of a slim checkpoint, in its folder and on the Hub."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from ..checkpoint.beside import LICENSE_KEYS
from ..data.rows import DataFacts
from ..tasks import TASKS
from .html import render_report
from .report import Report
from .words import named_units, sentence_class, title

# Class of sentence-transformers -> library, pipeline and tags of its models on the Hub.
_ON_HUB: dict[str | None, tuple[str, str | None, tuple[str, ...]]] = {
    "SentenceTransformer": (
        "sentence-transformers",
        "sentence-similarity",
        ("sentence-transformers", "feature-extraction", "sentence-similarity"),
    ),
    "CrossEncoder": ("sentence-transformers", "text-ranking", ("sentence-transformers", "cross-encoder", "reranker")),
}


def render_card(
    report: Report,
    *,
    location: str = "slim",
    origin: Mapping[str, Any] | None = None,
    images: Mapping[str, str] | None = None,
) -> str:
    """Return the README.md of a slim checkpoint.

    Args:
        location: Where the checkpoint is loaded from: its folder, or a Hub id; the export is beside it or in it.
        origin: `base_model` and the licence, as in the metadata of a card; see `checkpoint.beside.read_card`.
        images: File -> its caption.
    """
    return render_report(
        "card.md.j2",
        report,
        metadata=card_metadata(report, origin or {}).to_yaml(),
        images=images or {},
        location=location,
        on_hub="/" in location,
        download=shlex.join(["hf", "download", location, "--include", "gguf/*", "--local-dir", "."]),
        task=TASKS.get(report.task),
    )


def card_metadata(report: Report, origin: Mapping[str, Any]) -> ModelCardData:
    """Return the metadata at the top of the card.

    Source: https://huggingface.co/docs/hub/model-cards#model-card-metadata
    """
    data = report.details.data
    dataset, configuration = _dataset(data)
    task, units = TASKS.get(report.task), named_units(report.units)
    transformers = "transformers", report.task if task is None or task.on_hub else None, ()
    library, pipeline, tags = _ON_HUB.get(sentence_class(report), transformers)
    results = [
        EvalResult(
            task_type=report.task,
            dataset_type=dataset,
            dataset_name=data.name or data.file or "",
            dataset_config=configuration,
            dataset_split=data.evaluation_split,
            metric_type=name,
            metric_value=values.slim,
        )
        for name, values in report.metrics.items()
        if dataset and data.evaluation_labelled
    ]
    return ModelCardData(
        base_model=origin.get("base_model"),
        # The Hub knows adapter, finetune, merge and quantized: only "finetune" is true of changed weights in their own
        # precision. Without a relation, the Hub takes a repository with ONNX files for a quantization.
        base_model_relation="finetune" if origin.get("base_model") else None,
        library_name=library,
        pipeline_tag=pipeline,
        tags=[*tags, "hies-export", "pruning", *(name.replace(" ", "-") for name, _ in units)],
        datasets=dataset if data.name else None,
        metrics=list(report.metrics) if data.evaluation_labelled else None,
        model_name=title(report) if results else None,
        eval_results=results or None,
        **{key: origin[key] for key in LICENSE_KEYS if origin.get(key)},
    )


def _dataset(data: DataFacts) -> tuple[str | None, str | None]:
    """Return the data set's Hub id, or the kind of its files, and its configuration; None where unknown."""
    if data.name:  # owner/name or owner/name/configuration
        parts = data.name.split("/")
        return "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    if data.file:
        return Path(data.file.removesuffix(".gz")).suffix.removeprefix(".") or "imagefolder", None
    return None, None
