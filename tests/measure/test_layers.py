"""FLOPs by layer where heads and neurons are known: against formulas."""

from dataclasses import replace

import pytest
from support.neurons import bert_case, block, llama_case
from torch import nn

from hies_export.slim.bundles import cut_bundles
from hies_export.units.counts import LayerFlops, count_flops, flops_per_layer
from hies_export.units.units import PrunableModule


def test_layers_show_their_feed_forward_blocks() -> None:
    model, modules, batch = bert_case()
    removed = {"bert.encoder.layer.1": 14, modules[1].name: 2}
    slim = cut_bundles(model, modules, removed, unit="group")
    tokens, hidden = 2 * 12, model.config.hidden_size
    *layers, outside = flops_per_layer(slim, batch, modules)
    for i, (layer, heads, neurons) in enumerate(zip(layers, (6, 4, 6), (64, 50, 64), strict=True)):
        assert layer == LayerFlops(
            f"bert.encoder.layer.{i}",
            projections=2 * tokens * 4 * hidden * 8 * heads,
            products=2 * tokens * 2 * 12 * 8 * heads,
            other=0,
            feed_forward=2 * tokens * 2 * hidden * neurons,
        )
    assert outside == LayerFlops("", projections=0, products=0, other=2 * 2 * hidden * (hidden + 3))
    # Of heads alone, what the blocks compute is other.
    of_heads = flops_per_layer(slim, batch, modules[:3])
    assert of_heads == [*(replace(row, other=row.feed_forward, feed_forward=0) for row in layers), outside]
    assert sum(row.projections + row.products + row.other for row in of_heads) == count_flops(slim, batch)
    # Blocks alone define the layers too; what they do not know of is other.
    whole = {row.layer: row.projections + row.products for row in layers}
    alone = [replace(row, other=whole[row.layer], projections=0, products=0) for row in layers]
    assert flops_per_layer(slim, batch, modules[3:]) == [*alone, outside]


def test_layers_of_blocks_inside_and_beside_the_attention() -> None:
    model, modules, batch = llama_case()
    rows = flops_per_layer(model, batch, modules)
    assert [row.layer for row in rows] == ["model.layers.0", "model.layers.1", ""]
    tokens, hidden = 2 * 9, 32
    assert [row.feed_forward for row in rows] == [2 * tokens * 3 * hidden * 32] * 2 + [0]
    assert [row.other for row in rows[:2]] == [0, 0]
    # A block named after its consumer, and one that encloses no attention: each finds its layer.
    named = [block(m.consumer, m.units, producers=m.producers, consumer=m.consumer) for m in modules if m.kind == "mlp"]
    attention = [m for m in modules if m.kind == "attention"]
    assert flops_per_layer(model, batch, (*attention, *named)) == rows
    some = flops_per_layer(model, batch, (attention[0], named[1]))
    assert [row.layer for row in some] == ["model.layers.0", "model.layers.1", ""]
    total = sum(row.projections + row.products + row.other + row.feed_forward for row in some)
    assert total == count_flops(model, batch)


def test_layers_with_numbers_inside_and_layers_inside_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counts by hand: a block in a Sequential, and T5-like sublayers of which one is in a layer with the block."""
    attention = [
        PrunableModule(name=name, units=2, unit_width=1, consumer=f"{name}.o", slices=())
        for name in ("a.0.attention", "b.0.layer.0.attention")
    ]
    model = nn.ModuleDict({"a": nn.ModuleList([nn.ModuleDict({"attention": nn.Identity()})])})
    model["b"] = nn.ModuleList([nn.ModuleDict({"layer": nn.ModuleList([nn.ModuleDict({"attention": nn.Identity()})])})])
    blocks = [
        block(name, 4, producers=(f"{name}.0",), consumer=f"{name}.{last}")
        for name, last in (("a.0.mlp", "2"), ("b.0.ff", "wo"))
    ]
    found = {"": 1000, "a.0": 300, "a.0.attention": 100, "a.0.attention.o": 40, "a.0.mlp.0": 60, "a.0.mlp.2": 50}
    found |= {"b.0": 500, "b.0.layer.0": 200, "b.0.layer.0.attention": 70, "b.0.layer.0.attention.o": 30}
    found |= {"b.0.ff.0": 110, "b.0.ff.wo": 90}
    monkeypatch.setattr("hies_export.units.counts.flops_by_module", lambda model, batch: found)
    assert flops_per_layer(model, {}, [*attention, *blocks]) == [
        LayerFlops("a.0", projections=40, products=100, other=300 - 40 - 100 - 110, feed_forward=110),
        LayerFlops("b.0.layer.0", projections=30, products=70, other=100),
        LayerFlops("b.0", projections=0, products=0, other=500 - 200 - 200, feed_forward=200),
        LayerFlops("", projections=0, products=0, other=1000 - 300 - 500),
    ]
