"""Make reports without a run."""

import io
from typing import Any

from rich.console import Console

from hies_export.report.report import CUT, KEPT, Report
from hies_export.report.tables import print_report

# Rows of a run of which nothing more is worth a sentence.
DATA: dict[str, Any] = {
    **{"labels": "data", "calibration_samples": 32},
    **{"compensation_samples": 0, "evaluation_samples": 64, "evaluation_of": 64},
    **{"evaluation_split": "validation", "held_out_samples": 0, "held_out_split": "train", "held_out_further": True},
    **{"name": None, "file": None, "fingerprint": "f"},
}
TRIED: dict[str, Any] = {"candidate": 0, "token_weights": 1.0, "alpha": None, "chosen": False}

# What a deployment found, with a cascade among the forms.
_TIME: dict[str, Any] = {
    **{"runtime": "onnxruntime-cpu", "batch": 8, "sequence": 20, "phase": "rows", "dense_ms": 3.0, "slim_ms": 1.4},
    **{"ratio_low": 0.4, "ratio_high": 0.5, "control_ratio": 1.0, "control_low": 0.99, "control_high": 1.01},
}
_JUDGED = {"flops": 0.7, "kept": 0.995, "at_least": 0.99, "removed": 7}
_WAY = {
    **{"runtime": "onnxruntime-cpu", "bits": "float32", "kept": 1.0, "at_least": 0.995, "dense_ratio": 1.0},
    **{"flops": 0.7},
}
CASCADE: dict[str, Any] = {
    **{"disagreement": 0.01, "confidence": 0.95, "threshold": 0.4, "rows": 1821, "passed_on": 0.05},
    **{"stability": 0.995, "bytes": 4100},
}
SERVED: dict[str, Any] = {
    "forms": [
        {
            **{"model": model, "runtime": "onnxruntime-cpu", "bits": bits, "bytes": 4000, "quality": 0.9},
            **{"stability": kept, "stability_low": kept - 0.01, "stability_high": 1.0, "kept": kept, "at_least": 0.99},
            "times": [_TIME | {"ratio": ratio}],
        }
        for model, bits, kept, ratio in (
            ("dense", "float32", 1.0, 1.0),
            ("slim", "int8", 0.995, 0.45),
            ("cascade", "int8", 0.999, 0.48),
        )
    ],
    "deployment": {
        **{"promise": 0.99, "form": 1, "step": 0, "seconds": 60.0, "file": "onnx-int8/model.onnx"},
        "ways": [_WAY | {"judged": [_JUDGED]}, {"runtime": "openvino", "bits": "float32", "problem": "not installed"}],
    },
    "cascade": {
        **{"file": "onnx-cascade/model.onnx", "quantize": "int8", "parts": {"dense": 4000, "slim": 1200}},
        **{"shared_bytes": 900, "held_out_passed_on": 0.06, "differ": 9, "bound": 0.0098, "max_abs": 1e-6},
        "tried": [{"flops": 0.7, "passed_on": 0.06, "differ": 9}, {"flops": 0.5, "problem": "too many"}],
    },
    "outcome": {
        "budget": {
            "keep": {
                **{"predictions": 0.99, "runtime": "onnxruntime-cpu", "batch": 8, "sequence": 128, "dtype": "float32"}
            }
        },
        **{"found": {"value": 0.997, "bound": 0.991}, "predicted": 0.45, "samples": 581, "judged": [_JUDGED]},
    },
}


def outcome(budget: dict[str, Any], value: float, bound: float | None = None, **other: Any) -> dict[str, Any]:
    """Return `details.outcome` of a report: a budget, what was found of it, and other fields."""
    return {"budget": budget, "found": {"value": value} | ({} if bound is None else {"bound": bound}), **other}


def latency_row(runtime: str, ratio: float, **other: Any) -> dict[str, Any]:
    row = {
        **{"runtime": runtime, "provider": "cpu", "batch": 8, "sequence": 128, "dense_ms": 100.0},
        **{"slim_ms": 100 * ratio, "ratio": ratio, "ratio_low": ratio - 0.01, "ratio_high": ratio + 0.012},
        **{"dense_p90_ms": 110.0, "slim_p90_ms": 110 * ratio, "realised": 0.9, "noisy": False},
        **{"control_ratio": 1.001, "control_low": 0.995, "control_high": 1.006},
    }
    return row | other


def terminal(report: Report) -> str:
    """Return what a report prints."""
    out = io.StringIO()
    print_report(report, Console(file=out, width=200))
    return out.getvalue()


def alphas(*tried: float) -> list[dict[str, Any]]:
    """Return the candidates of `alpha: auto`, of which 0.5 was chosen."""
    return [
        TRIED | {"criterion": "hies", "alpha": a, "quality": 0.8 + a / 10, "stability": 0.9, "chosen": a == 0.5}
        for a in tried
    ]


def make_report(*, layers: int = 3, heads: int = 4, neurons: int = 0, **details: Any) -> Report:
    """Make a report of a model with so many heads, and neurons if any, in every layer; layer i loses i / 8 of these."""
    modules = [f"encoder.layer.{i}" for i in range(layers)]
    lines = {m: "".join(CUT if (i + h) % 4 == 0 else KEPT for h in range(heads)) for i, m in enumerate(modules)}
    numbers = {
        m: {
            "his": [0.01 * (i * heads + h) for h in range(heads)],
            "entropy": [0.5 + 0.1 * (h % 4) for h in range(heads)],
            "score": [0.123456 + 0.01 * h for h in range(heads)],
        }
        for i, m in enumerate(modules)
    }
    kept = [line.count(KEPT) for line in lines.values()]
    stay = [neurons - neurons * (i % 8) // 8 for i in range(layers)]
    blocks = {f"{m}.output": {"kept": count, "total": neurons} for m, count in zip(modules, stay, strict=True)}
    counts = {"total": layers * neurons, "removed": layers * neurons - sum(stay), "kept_per_layer": stay}
    return Report(
        model="some/model",
        task="text-classification",
        criterion="hies",
        alpha=0.5,
        seed=0,
        heads={"total": layers * heads, "removed": layers * heads - sum(kept), "kept_per_layer": kept},
        neurons=counts if neurons else None,
        parameters={"dense": 1000, "slim": 800},
        bytes={"dense": 4000, "slim": 3200, "onnx": 3300},
        flops={"dense": 10**9, "slim": 8 * 10**8, "shape": [8, 128]},
        quality={"metric": "accuracy", "dense": 0.9, "slim": 0.89},
        stability=0.97,
        cut_max_abs=1e-6,
        reload_max_abs=0.0,
        onnx_max_abs=2e-6,
        seconds={"score": 1.0, "measure": 2.0},
        latency=[
            latency_row("torch", 0.83),
            latency_row("onnxruntime-cpu", 0.81),
            latency_row("onnxruntime-cpu-int8", 0.7, noisy=True, control_low=1.03, control_high=1.2),
        ],
        environment={"cpu": "A Processor With A Very Long Name @ 2.00GHz", "torch": "2.13.0", "gpu": None},
        details={
            "head_map": lines,
            "heads": numbers,
            **({"neurons": blocks} if neurons else {}),
            "metrics": {"accuracy": {"dense": 0.9, "slim": 0.89}, "f1": {"dense": 0.8, "slim": 0.81}},
            "tried": alphas(0.0, 0.5, 0.9),
            "data": DATA,
            **details,
        },
    )
