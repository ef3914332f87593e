"""Costs of heads and neurons in one table: against cut models, and against formulas."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.neurons import Case, bert_case, llama_case
from torch import nn
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

from hies_export.forms.formats import Exporter, Given
from hies_export.forms.latency import TimedCut, TimedOn, latency_table
from hies_export.model.copies import share_weights
from hies_export.recipe.sections import ExportSection
from hies_export.select.constraints import bundle_count
from hies_export.slim import bundles
from hies_export.slim.bundles import cut_bundles, flops_table, parameters_table
from hies_export.units.counts import count_flops
from hies_export.units.units import PrunableModule


def uneven(modules: tuple[PrunableModule, ...], unit: str, seed: int) -> dict[str, int]:
    generator = torch.Generator().manual_seed(seed)
    return {m.name: int(torch.randint(bundle_count(m, unit), (), generator=generator)) for m in modules}


@pytest.mark.parametrize("case", [bert_case, llama_case])
@pytest.mark.parametrize("unit", ["group", "query"])
def test_both_kinds_cost_what_an_uneven_cut_is_counted_to_save(case: Any, unit: str) -> None:
    model, modules, batch = case()
    flops, parameters = flops_table(model, modules, batch=batch, unit=unit), parameters_table(model, modules, unit=unit)
    assert [len(row) for row in parameters.saved.values()] == [bundle_count(module, unit) + 1 for module in modules]
    for seed in range(2):
        removed = uneven(modules, unit, seed)
        slim = cut_bundles(model, modules, removed, unit=unit)
        assert flops.ratio(removed) == pytest.approx(count_flops(slim, batch) / count_flops(model, batch), abs=1e-12)
        sizes = [sum(p.numel() for p in {id(p): p for p in m.parameters()}.values()) for m in (slim, model)]
        assert parameters.ratio(removed) == pytest.approx(sizes[0] / sizes[1], abs=1e-12)
        assert sizes[0] < sizes[1]


def test_a_neuron_saves_what_its_row_and_column_take() -> None:
    model, modules, batch = bert_case()
    hidden, tokens = model.config.hidden_size, 2 * 12
    flops, parameters = flops_table(model, modules, batch=batch), parameters_table(model, modules)
    name = "bert.encoder.layer.1"
    # A row of the producer with its bias, and a column of the consumer; a multiply-add is two operations.
    assert parameters.saved[name][1] * sum(p.numel() for p in model.parameters()) == pytest.approx(2 * hidden + 1)
    assert flops.saved[name][7] * count_flops(model, batch) == pytest.approx(7 * tokens * 2 * 2 * hidden)
    assert parameters_table(share_weights(model, device="meta"), modules) == parameters


def test_few_cuts_are_counted_however_many_modules_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: list[dict[str, int]] = []
    original = bundles.cut_bundles
    monkeypatch.setattr(
        bundles, "cut_bundles", lambda m, s, removed, **k: counted.append(removed) or original(m, s, removed, **k)
    )
    model, modules, batch = bert_case()
    table = flops_table(model, modules, batch=batch)
    # One cut per kind, and the uneven one that checks them.
    assert len(counted) == 3
    # Each module by itself gives the same numbers.
    monkeypatch.setattr(bundles, "_attributed", lambda of_kind, dense, cut: {m.name: -1 for m in of_kind})
    assert flops_table(model, modules, batch=batch) == table
    assert len(counted) == 6 + len(modules)


class _Energy(LlamaMLP):
    """Multiplies the neurons with themselves: operations in neither of the block's linear layers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        return self.down_proj(inner) * (inner[..., None, :] @ inner[..., None])[..., 0]


@pytest.mark.parametrize("named_after", ["block", "consumer"])
def test_operations_outside_of_the_linear_layers_count(named_after: str) -> None:
    """Whether the module encloses them, or they belong to no module and each module is cut by itself."""
    model, modules, batch = llama_case()
    plain = flops_table(model, modules, batch=batch)
    for layer in model.model.layers:
        layer.mlp.__class__ = _Energy
    if named_after == "consumer":
        modules = tuple(replace(m, name=m.consumer) if m.kind == "mlp" else m for m in modules)
    table, removed = flops_table(model, modules, batch=batch), uneven(modules, "group", 4)
    slim = cut_bundles(model, modules, removed, unit="group")
    assert table.ratio(removed) == pytest.approx(count_flops(slim, batch) / count_flops(model, batch), abs=1e-12)
    assert list(table.saved.values()) != list(plain.saved.values())


class _Values(nn.Linear):
    """Reads the values of its inputs, which tensors without data have not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert float(x.sum()) != 0.5
        return super().forward(x)


def test_a_forward_that_reads_values_is_counted_on_values() -> None:
    model, modules, batch = bert_case()
    table = flops_table(model, modules, batch=batch)
    model.classifier.__class__ = _Values
    assert flops_table(model, modules, batch=batch) == table


def timed_table(monkeypatch: pytest.MonkeyPatch, cuts: list[TimedCut], case: Case, *, unit: str = "group") -> Any:
    monkeypatch.setattr("hies_export.forms.latency._time_cuts", lambda *_, **__: cuts)
    model, modules, batch = case
    return latency_table(
        model, modules, TimedOn("torch", batch, Exporter(ExportSection(), Given(batch)), repeats=1), unit=unit
    )


def cut(kind: str, kept: float, ratio: float) -> TimedCut:
    return TimedCut(kept, ratio, ratio, ratio, kind)


def test_heads_and_neurons_save_by_their_own_curves(monkeypatch: pytest.MonkeyPatch) -> None:
    cuts = [cut("attention", 0.5, 0.9), cut("mlp", 0.75, 0.8), cut("mlp", 0.25, 0.5)]
    case = bert_case()
    attention, mlp = case[1][:3], case[1][3:]
    table = timed_table(monkeypatch, cuts, case)
    assert list(table.saved) == [module.name for module in case[1]]
    assert [row["kind"] for row in table.measured] == ["attention", "mlp", "mlp"]
    half = {module.name: 3 for module in attention}
    quarter = {module.name: 48 for module in mlp}
    assert table.ratio(half) == pytest.approx(0.9)
    assert table.ratio(quarter) == pytest.approx(0.5)
    assert table.ratio({module.name: 32 for module in mlp}) == pytest.approx(0.65)
    assert table.ratio(half | quarter) == pytest.approx(1 - 0.1 - 0.5)
    # All blocks are alike, so one of three saves a third.
    assert table.ratio({mlp[1].name: 48}) == pytest.approx(1 - 0.5 / 3)


def test_cuts_are_timed_for_each_kind_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut touches one kind."""
    control, found = SimpleNamespace(noisy=False), SimpleNamespace(ratio=0.9, ratio_low=0.9, ratio_high=0.9)
    monkeypatch.setattr("hies_export.forms.latency.time", lambda *_, **__: [[control], [found]])
    widths: list[tuple[set[int], set[int]]] = []
    original = cut_bundles

    def spy(model: PreTrainedModel, modules: Any, removed: Any, *, unit: str) -> PreTrainedModel:
        slim = original(model, modules, removed, unit=unit)
        layers = slim.bert.encoder.layer
        widths.append(
            ({x.attention.self.num_attention_heads for x in layers}, {x.output.dense.in_features for x in layers})
        )
        return slim

    monkeypatch.setattr("hies_export.forms.latency.cut_bundles", spy)
    model, modules, batch = bert_case()
    flops = flops_table(model, modules, batch=batch, unit="group")
    monkeypatch.setattr("hies_export.forms.latency.flops_table", lambda *_, **__: flops)
    where = TimedOn("torch", batch, Exporter(ExportSection(), Given(batch)), repeats=1)
    latency_table(model, modules, where)
    of_heads = [({kept}, {64}) for kept in (4, 3, 2, 1)]
    assert widths == [*of_heads, *(({6}, {kept}) for kept in (48, 32, 16, 1))]
