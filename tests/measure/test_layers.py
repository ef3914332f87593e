"""FLOPs by layer where heads and neurons are known: against formulas."""

from __future__ import annotations

from support.neurons import bert_case, block, llama_case

from hies_export.cost.cut import cut_bundles
from hies_export.measure.counts import LayerFlops, count_flops, flops_per_layer


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
    # Blocks alone define the layers too; what they do not know of is other.
    alone = flops_per_layer(slim, batch, modules[3:])
    assert [(row.layer, row.feed_forward) for row in alone] == [
        (row.layer, row.feed_forward) for row in (*layers, outside)
    ]
    assert [row.other for row in alone] == [row.projections + row.products for row in layers] + [outside.other]


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
