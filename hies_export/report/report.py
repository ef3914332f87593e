"""The report of a run: typed parts that are written as report.json, which every rendering is made from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, asdict, field, fields
from pathlib import Path
from typing import Any

from pydantic.dataclasses import dataclass

from ..errors import RequestError
from ..values import dump_json


class Part(Mapping[str, Any]):
    """A part of the report, typed, which also answers to the keys of report.json: `report.quality["slim"]`."""

    def __getitem__(self, key: str) -> Any:
        return vars(self)[key]

    def __iter__(self) -> Iterator[str]:
        return iter(vars(self))

    def __len__(self) -> int:
        return len(vars(self))


# Without `eq`, which would refuse to compare a part with a mapping.
@dataclass(frozen=True, eq=False)
class UnitCounts(Part):
    """How many units of a kind, such as heads, the dense model has and how many were removed.

    Attributes:
        total: Units of the dense model.
        removed: Those that the slim model lacks.
        kept_per_layer: Units that each module keeps; of attention, query heads.
    """

    total: int
    removed: int
    kept_per_layer: Sequence[int]

    @property
    def kept(self) -> int:
        """Units of the slim model."""
        return self.total - self.removed


@dataclass(frozen=True, eq=False)
class DenseSlim(Part):
    """A number of the dense model and the same number of the slim one."""

    dense: int | float
    slim: int | float

    @property
    def ratio(self) -> float:
        """The slim model's number as a share of the dense one's."""
        return self.slim / self.dense


@dataclass(frozen=True, eq=False)
class WeightBytes(DenseSlim):
    """Bytes of both checkpoints' weights, and of the slim model's ONNX graph and weights."""

    onnx: int


@dataclass(frozen=True, eq=False)
class Flops(DenseSlim):
    """Floating-point operations of one forward pass at `shape`, (batch, sequence)."""

    shape: Sequence[int]


@dataclass(frozen=True, eq=False)
class Quality(Part):
    """The first metric of the recipe, by name, and its value for both models."""

    metric: str
    dense: float
    slim: float


@dataclass(frozen=True, eq=False, kw_only=True)
class LatencyRow(Part):
    """Both models timed on one runtime at one shape. Reports of older versions lack what has a default.

    Attributes:
        runtime, provider, dtype: What ran the models, on which device or provider, and in which precision.
        phase: "forward"; of models that generate, "prefill" or "decode".
        batch, sequence: The shape.
        dense_ms, slim_ms: Median times in milliseconds; `_p90_ms` and `_p99_ms` are percentiles.
        ratio, ratio_low, ratio_high: Median of the paired ratios slim / dense, and its 95 % interval.
        realised: Share of the saved FLOPs that was saved in time; None where FLOPs do not decide.
        flops_ratio: FLOPs of the slim model as a share of the dense one's.
        tokens_per_second: Of the phase "decode".
        control_ratio, control_low, control_high: As `ratio`, of the dense model against itself.
        noisy: Whether the control shows that the ratio means nothing.
        repeats, loads, threads, cuda_graph: How often and how it was timed.
        peak_bytes: Device memory at the peak of a run.
        gpu_clock_mhz: The GPU's clock after the last run.
    """

    runtime: str
    provider: str = ""
    dtype: str = "float32"
    phase: str = "forward"
    batch: int
    sequence: int
    dense_ms: float
    slim_ms: float
    ratio: float
    ratio_low: float
    ratio_high: float
    realised: float | None = None
    flops_ratio: float | None = None
    tokens_per_second: DenseSlim | None = None
    dense_p90_ms: float | None = None
    dense_p99_ms: float | None = None
    slim_p90_ms: float | None = None
    slim_p99_ms: float | None = None
    control_ratio: float
    control_low: float
    control_high: float
    noisy: bool = False
    repeats: int | None = None
    loads: int = 1
    threads: int | None = None
    cuda_graph: bool = False
    peak_bytes: DenseSlim | None = None
    gpu_clock_mhz: float | None = None


@dataclass(frozen=True)
class Report:
    """What a run removed, and the quality, size and time of both models.

    A part may be given as the mapping that report.json holds. All fields but `details` are the summary that other
    programs read.

    Attributes:
        model: Path or Hub id of the dense model.
        task: Task of the recipe.
        criterion: What the heads were chosen by.
        alpha: Weight of the importance in that criterion; None where it has none.
        seed: Seed of the run.
        heads: Query heads.
        parameters: Number of parameters.
        bytes: Size of the weights.
        flops: Floating-point operations of one forward pass.
        quality: First metric.
        stability: Share of evaluated samples whose prediction equals the dense model's.
        cut_max_abs: Largest difference between the outputs of the cut and the masked model.
        reload_max_abs: Largest difference between the outputs of the saved and the reloaded model.
        onnx_max_abs: Largest difference between the outputs of the ONNX and the torch model.
        seconds: Time spent by stage: score, cut, export, measure.
        latency: One row per runtime, precision, phase and shape.
        environment: Hardware and library versions that the numbers were measured with.
        cache_bytes_per_token: Bytes that a token adds to the key/value cache; None for a model without a cache.
        details: What the renderings show beyond the summary: marks and numbers of every head, all metrics, data.
    """

    model: str
    task: str
    criterion: str
    alpha: float | None
    seed: int
    heads: UnitCounts
    parameters: DenseSlim
    bytes: WeightBytes
    flops: Flops
    quality: Quality
    stability: float
    cut_max_abs: float
    reload_max_abs: float
    onnx_max_abs: float
    seconds: Mapping[str, float]
    latency: Sequence[LatencyRow]
    environment: Mapping[str, Any]
    cache_bytes_per_token: DenseSlim | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        """Return everything but `details`, as plain values."""
        return {name: value for name, value in asdict(self).items() if name != "details"}

    def to_json(self) -> str:
        """Return the whole report as JSON text."""
        return dump_json(asdict(self))

    @classmethod
    def from_file(cls, path: str | Path) -> Report:
        """Read a report.json, given itself or by the folder of its run.

        Raises:
            RequestError: There is none, or it is not a report.
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
