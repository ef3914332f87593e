"""The names of the first design against what they are now called."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from support.models import bert, causal_lm, text_batch
from torch import Tensor

import hies_export
from hies_export import AttentionSite, HeadScores, HeadStatistics, KeptHeads, PruningPlan
from hies_export.errors import PlanError, RecipeError
from hies_export.slim.refit import Compensation


def logits_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    with torch.inference_mode():
        return model(**{key: value for key, value in batch.items() if key != "labels"}).logits


def made(make: Any) -> tuple[Any, dict[str, Tensor], Any, PruningPlan]:
    model = make()
    batch = {key: value % 32 if key == "input_ids" else value for key, value in text_batch(6, 12, labels=False).items()}
    sites = hies_export.find_attention(model, batch)
    scores = HeadScores("random", {}, {site.name: torch.rand(site.heads, dtype=torch.float64) for site in sites})
    return model, batch, sites, hies_export.select_heads(scores, sites, heads=0.5, seed=3)


@pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")
@pytest.mark.parametrize("make", [bert, causal_lm])
def test_old_names_do_what_the_new_ones_do(make: Any) -> None:
    model, batch, sites, plan = made(make)
    assert (plan.criterion, plan.alpha, plan.seed) == ("random", None, 3)
    dense = logits_of(model, batch)
    with hies_export.masked_heads(model, plan):
        by_attention = logits_of(model, batch)
    with hies_export.masked_units(model, plan, sites):
        by_consumer = logits_of(model, batch)
    torch.testing.assert_close(by_attention, by_consumer, rtol=1e-4, atol=1e-5)
    assert (by_attention - dense).abs().max() > 1e-3
    assert torch.equal(logits_of(model, batch), dense)
    slim, other = hies_export.prune_heads(model, plan, sites), hies_export.prune_units(model, plan.kept, sites)
    assert hies_export.check_cut(model, slim, plan, batch) == hies_export.compare_cut(model, other, plan, sites, batch)
    found = hies_export.compensate_heads(model, slim, plan, sites, [batch] * 2, ridge=0.1)
    assert hies_export.compensate(model, other, plan, sites, [batch] * 2, Compensation(ridge=0.1)) == found
    for name, parameter in slim.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_old_fields_are_properties() -> None:
    _, _, sites, plan = made(causal_lm)
    for site in sites:
        assert (site.heads, site.key_value_heads, site.group_size) == (4, 2, 2)
        assert (site.query_dim, site.value_dim, site.output) == (8, 8, f"{site.name}.o_proj")
        kept = plan.kept[site.name]
        assert kept.key_value == tuple(sorted({head // 2 for head in kept.query}))
        assert (kept.heads, kept.key_value_heads) == (4, 2)


def test_old_values_can_be_built() -> None:
    site = AttentionSite("a", 4, 2, 8, 8, (), "a.o", attributes={"n": "group_size", "w": "query_width"})
    assert {name: count.value(units=6, groups=2) for name, count in site.attributes.items()} == {"n": 3, "w": 48}
    assert KeptHeads((0, 1), (0,), 4, 2).units == (0, 1)
    with pytest.raises(PlanError, match="goes when, and only when, its query heads go"):
        KeptHeads((0, 1), (0, 1), 4, 2)
    row = {"a": torch.tensor([0.1, 0.2, 0.4, 0.3], dtype=torch.float64)}
    statistics = HeadStatistics(his=row, entropy=row, weight_l2=row, samples=3, labels="data", fingerprint="f")
    assert (statistics.samples, statistics.his, statistics["entropy"]) == (3, row, row)
    scores = hies_export.score_heads(statistics, criterion="his")
    assert hies_export.select_heads(scores, (site,), heads=0.5).kept["a"].query == (2, 3)
    with pytest.raises(RecipeError, match="allocation must be global or uniform, got 'even'"):
        hies_export.select_heads(scores, (site,), heads=0.5, allocation="even")


def test_a_plan_of_format_1_is_read() -> None:
    kept = {"query": [0, 1, 4, 5], "key_value": [0, 2], "heads": 6, "key_value_heads": 3}
    fields = {"criterion": "hies", "alpha": 0.5, "seed": 7, "calibration": {"samples": 8}, "versions": {}, "model": {}}
    plan = PruningPlan.from_json(json.dumps({"format": 1, "kept": {"layer": kept}, **fields}))
    assert (plan.kept["layer"].units, plan.kept["layer"].total, plan.kept["layer"].groups) == ((0, 1, 4, 5), 6, 3)
    written = json.loads(plan.to_json())
    assert written == {"format": 2, "kept": {"layer": {"units": [0, 1, 4, 5], "total": 6, "groups": 3}}, **fields}
    assert PruningPlan.from_json(plan.to_json()) == plan
    broken = {"format": 1, "kept": {"layer": kept | {"key_value": [0, 1]}}, **fields}
    with pytest.raises(PlanError, match="in layer the plan keeps query heads"):
        PruningPlan.from_json(json.dumps(broken))
