"""What a cut keeps and refuses; that it holds for every architecture is in test_architectures.py."""

import copy
import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.cuts import plan_of, random_cut, random_plan
from support.families import architecture, decoder
from support.models import bert, image_batch, text_batch, vit
from support.tolerance import assert_near
from transformers import PreTrainedModel

from hies_export.checkpoint.loading import load
from hies_export.checkpoint.save import save_slim
from hies_export.errors import CutMismatchError, PlanError, UnsupportedModelError
from hies_export.prunable.attention import find_attention
from hies_export.slim.check import compare_cut, first_output
from hies_export.slim.cut import prune_units
from hies_export.units import Kept
from hies_export.values import PruningPlan, Scores

gpt_oss = decoder("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1)


@pytest.mark.parametrize("make", [bert, vit], ids=["bert", "vit"])
def test_a_slim_model_can_be_pruned_again(make: Callable[[], PreTrainedModel], tmp_path: Path) -> None:
    dense = make()
    batch = text_batch() if dense.main_input_name == "input_ids" else image_batch()
    once, _, _ = random_cut(dense, batch)
    sites = find_attention(once, batch)
    plan = random_plan(sites, uniform=False, seed=1)
    twice = prune_units(once, plan, sites, inplace=True)
    assert twice is once
    save_slim(twice, tmp_path / "slim", plan=plan, batch=batch)
    assert_near(first_output(load(tmp_path / "slim"), batch), first_output(twice, batch))


def test_slim_models_can_be_copied_and_pickled() -> None:
    dense, batch = bert(), text_batch()
    slim, _, _ = random_cut(dense, batch)
    for other in (copy.deepcopy(slim), pickle.loads(pickle.dumps(slim))):
        assert type(other) is type(slim)
        assert_near(first_output(other, batch), first_output(slim, batch))


@pytest.mark.parametrize("make", [bert, gpt_oss], ids=["bert", "gpt_oss"])
def test_a_slim_config_says_what_its_modules_have(make: Callable[[], PreTrainedModel]) -> None:
    dense, batch = make(), text_batch(labels=False)
    slim, plan, sites = random_cut(dense, batch)
    said = slim.config.hies_export
    changed = 0
    for site in sites:
        old, new = (model.get_submodule(site.name) for model in (dense, slim))
        name, kept = site.name.removeprefix(f"{dense.base_model_prefix}."), list(plan.kept[site.name].units)
        numbers = {key: number for key, number in vars(new).items() if isinstance(number, int)}
        numbers = {key: number for key, number in numbers.items() if number != vars(old)[key]}
        assert said["attributes"].get(name, {}) == numbers
        changed += len(numbers)
        if make is gpt_oss:  # a number per head, outside of all layers
            assert torch.equal(new.sinks, old.sinks[kept])
            assert new.sinks.requires_grad
            assert said.get("parameters", {}).get(f"{name}.sinks", [site.units]) == [len(kept)]
    assert changed > 0 or make is gpt_oss
    assert compare_cut(dense, slim, plan, sites, batch) < 1e-4


def test_dtype_device_and_frozen_weights_are_kept() -> None:
    dense, batch = bert().to(torch.bfloat16), text_batch()
    dense.bert.encoder.layer[0].attention.self.query.weight.requires_grad_(False)
    slim, plan, sites = random_cut(dense, batch, uniform=True)
    assert {p.dtype for p in slim.parameters()} == {torch.bfloat16}
    assert [n for n, p in slim.named_parameters() if not p.requires_grad] == [
        "bert.encoder.layer.0.attention.self.query.weight"
    ]
    assert compare_cut(dense, slim, plan, sites, batch) < 1e-4


def test_a_wrong_cut_is_caught() -> None:
    dense, batch = bert(), text_batch()
    slim, plan, sites = random_cut(dense, batch, uniform=True)
    layer = slim.bert.encoder.layer[1].attention.self
    with torch.no_grad():
        layer.value.bias.add_(0.01)
    with pytest.raises(CutMismatchError, match=r"must equal the masked model to 0\.0001, but differs by .*\(bert\)"):
        compare_cut(dense, slim, plan, sites, batch)
    with torch.no_grad():
        layer.value.bias.fill_(float("nan"))
    with pytest.raises(CutMismatchError, match="differs by inf"):
        compare_cut(dense, slim, plan, sites, batch)


def test_plans_that_do_not_fit_are_refused() -> None:
    dense, batch = bert(), text_batch()
    sites = find_attention(dense, batch)
    plan = random_plan(sites, uniform=True)
    first, *_ = plan.kept

    def broken(*units: int, total: int = 6) -> PruningPlan:
        return PruningPlan("random", kept=dict(plan.kept) | {first: Kept(units, total)})

    other = find_attention(vit(), image_batch())
    with pytest.raises(PlanError, match="3 are missing from it .* and 3 are not in the model"):
        prune_units(dense, plan, other)
    with pytest.raises(PlanError, match="is for 8 query and 8 key/value heads"):
        prune_units(dense, broken(0, total=8), sites)
    for heads in ((), (1, 0), (0, 0), (5, 6), (-1, 0)):
        with pytest.raises(PlanError, match=r"ascending indices in \[0, 6\)"):
            prune_units(dense, broken(*heads), sites)


def test_the_same_plan_gives_the_same_bytes(tmp_path: Path) -> None:
    dense, batch = vit(), image_batch()
    sites = find_attention(dense, batch)
    plan = random_plan(sites, uniform=False)
    for name in ("one", "two"):
        save_slim(prune_units(dense, plan, sites), tmp_path / name, plan=plan, batch=batch)
    files = sorted(p.name for p in (tmp_path / "one").iterdir())
    assert files == [".hies_export", "config.json", "hies_plan.json", "model.safetensors", "modeling_hies.py"]
    assert all((tmp_path / "one" / f).read_bytes() == (tmp_path / "two" / f).read_bytes() for f in files)


REFUSED = {
    "deberta": (architecture("DebertaV2", num_hidden_layers=1), "computes its own"),
    "olmo2": (
        architecture("Olmo2", "ForCausalLM", num_hidden_layers=1),
        r"query heads do not have features of their own in model.layers.0.self_attn.q_proj \(they are mixed",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_refused_by_name(name: str) -> None:
    make_model, reason = REFUSED[name]
    model = make_model()
    with pytest.raises(UnsupportedModelError, match=reason) as error:
        find_attention(model, text_batch(labels=False, padding=False))
    assert type(model).__name__ in str(error.value)


def test_scores_of_any_origin_can_be_selected_from() -> None:
    dense, batch = bert(), text_batch()
    sites = find_attention(dense, batch)
    scores = Scores("mine", {}, {s.name: torch.arange(s.units).double() for s in sites})
    plan = plan_of(scores, sites, heads=0.5)
    slim = prune_units(dense, plan, sites)
    assert [s.units for s in find_attention(slim, batch)] == [3, 3, 3]
