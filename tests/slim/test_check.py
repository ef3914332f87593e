"""What `slim/check.py` compares and refuses: plans, weights, and the outputs of a cut model; and what a cut leaves."""

import copy
import dataclasses
import pickle
from typing import Any

import pytest
import torch
from support.cuts import random_cut, random_neurons, random_plan
from support.models import bert, causal_lm, text_batch
from support.tolerance import assert_near

from hies_export import CutMismatchError, Kept, PlanError, compare_cut, find_attention, find_modules, prune_units
from hies_export.data.batches import first_output
from hies_export.kinds import ATTENTION, BOTH, MLP
from hies_export.select.fingerprint import check_selection, fingerprint
from hies_export.slim import check as check_module
from hies_export.slim.check import masked_units
from hies_export.units.units import Units


def test_half_precision_is_compared_in_float32() -> None:
    """A wrong weight of which bfloat16 outputs show nothing, because a large bias rounds it away, is caught."""
    dense, batch = bert(), text_batch()
    with torch.no_grad():
        dense.classifier.bias.fill_(192.0)  # neighbours in bfloat16 are 1 apart
    dense = dense.to(torch.bfloat16)
    slim, plan, sites = random_cut(dense, batch, uniform=True)
    assert 0 <= compare_cut(dense, slim, plan, sites, batch) < 1e-4
    with torch.no_grad():
        slim.bert.encoder.layer[2].attention.output.dense.bias.add_(0.5)
    assert_near(first_output(slim, batch), first_output(dense, batch), within=0.03)  # a few roundings
    with pytest.raises(CutMismatchError, match="differs by"):
        compare_cut(dense, slim, plan, sites, batch)
    # What was compared were copies.
    assert dense.dtype == slim.dtype == torch.bfloat16


def test_the_difference_is_the_largest_of_all_elements() -> None:
    dense, batch = bert(), text_batch()
    slim, plan, sites = random_cut(dense, batch)
    assert compare_cut(dense, slim, plan, sites, batch) < 1e-6
    with torch.no_grad():
        slim.classifier.bias[1] -= 5e-5
    with pytest.raises(CutMismatchError, match="to 1e-06 of the largest output, but the model differs by 5e-05, where"):
        compare_cut(dense, slim, plan, sites, batch)


@pytest.fixture(scope="module")
def cut() -> tuple[Any, ...]:
    """A decoder of thirty layers with large outputs, as real ones have; the same without some units; what stayed."""
    torch.manual_seed(0)
    deep = causal_lm(num_hidden_layers=30, num_key_value_heads=2)
    with torch.no_grad():
        deep.lm_head.weight.mul_(1e4)
    batch = {"input_ids": torch.randint(5, deep.config.vocab_size, (2, 24))}
    modules = find_modules(deep, batch, kinds=BOTH)
    kept = {m.name: m.kept(range(m.units - 1 if m.kind == MLP else m.units // 2)) for m in modules}
    return deep, prune_units(deep, kept, modules), kept, modules, batch


@pytest.fixture
def deep_cut(cut: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same with a copy of the slim model, which a test may change."""
    deep, slim, *kept = cut
    return deep, copy.deepcopy(slim), *kept


def test_a_deep_model_with_large_outputs_is_cut(deep_cut: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding alone moves its outputs by more than 1e-4, but not those of a block by itself."""
    deep, slim, kept, modules, batch = deep_cut
    with masked_units(deep, kept, modules):
        masked = first_output(deep, batch)
    moved = (first_output(slim, batch) - masked).abs().max().item()
    assert moved > 1e-4
    assert compare_cut(deep, slim, kept, modules, batch) < 0.1 * moved
    monkeypatch.setattr(check_module, "SURE_IN_FLOAT32", 0.0)  # every block once more in float64
    assert compare_cut(deep, slim, kept, modules, batch) < 1e-9


def test_a_block_that_does_not_run_in_float64_is_compared_in_float32_alone(
    deep_cut: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    deep, slim, kept, modules, batch = deep_cut
    monkeypatch.setattr(check_module, "SURE_IN_FLOAT32", 0.0)  # so that float64 is tried
    refused = []
    with torch.no_grad():  # or both blocks may round alike
        slim.model.layers[15].mlp.down_proj.weight.mul_(1 + 1e-5)

    def refuse(layer: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> None:
        if args[0].dtype == torch.float64:
            refused.append(layer)
            raise RuntimeError("not implemented for double")

    slim.model.layers[15].mlp.down_proj.register_forward_pre_hook(refuse)
    assert 0 < compare_cut(deep, slim, kept, modules, batch) < 1e-4
    assert refused
    with torch.no_grad():
        slim.model.layers[15].mlp.down_proj.weight.mul_(1.5)
    with pytest.raises(CutMismatchError, match=r"to 0\.0001 of the largest output, but model.layers.15 differs by"):
        compare_cut(deep, slim, kept, modules, batch)


@pytest.mark.parametrize(
    ("kind", "wrong"), [(ATTENTION, "one unit more"), (MLP, "two units swapped"), (MLP, "another unit")]
)
def test_a_wrong_cut_of_a_deep_model_is_refused(deep_cut: tuple[Any, ...], kind: str, wrong: str) -> None:
    deep, slim, kept, modules, batch = deep_cut
    module = [m for m in modules if m.kind == kind][15]
    units = list(kept[module.name].units)
    if wrong == "two units swapped":
        consumer, width = slim.get_submodule(module.consumer), module.unit_width
        order = [*range(width, 2 * width), *range(width), *range(2 * width, consumer.in_features)]
        with torch.no_grad():  # the columns of the consumer, but not the rows of its producers
            consumer.weight.copy_(consumer.weight[:, order])
    else:
        other = sorted({*range(module.units)} - {*units})[: module.group_size]
        changed = [*units, *other] if wrong == "one unit more" else [*units[module.group_size :], *other]
        slim = prune_units(deep, {**kept, module.name: module.kept(sorted(changed))}, modules)
    said = "to 1e-07 of the largest output, but model.layers.15 differs by .* nothing was saved"
    with pytest.raises(CutMismatchError, match=said):
        compare_cut(deep, slim, kept, modules, batch)


def test_an_output_is_the_first_in_evaluation_mode_and_labels_are_left_out() -> None:
    model, batch = bert(hidden_dropout_prob=0.5).train(), text_batch()
    found = first_output(model, batch)
    assert model.training
    with torch.no_grad():
        expected = model.eval()(**{name: batch[name] for name in ("input_ids", "attention_mask")}).logits
    assert_near(found, expected)
    assert first_output(model.to(torch.bfloat16), batch).dtype == torch.float32
    # Of an encoder alone, hidden states come before what is pooled of them.
    found = first_output(bert().base_model, {name: batch[name] for name in ("input_ids", "attention_mask")})
    assert found.shape[:2] == batch["input_ids"].shape


def test_a_plan_of_other_weights_is_not_cut_by_and_a_selection_is() -> None:
    dense, batch = bert(), text_batch()
    sites = find_attention(dense, batch)
    plan = dataclasses.replace(random_plan(sites, uniform=True), model=fingerprint(dense, sites))
    other = bert()
    with torch.no_grad():
        other.get_submodule(sites[-1].consumer).weight.mul_(1.01)
    with pytest.raises(PlanError, match="make a plan for this model"):
        prune_units(other, plan, sites)
    prune_units(other, plan.kept, sites)
    # Without weights there are no norms to compare.
    prune_units(dense.to("meta"), plan, sites)


GROUPED = Units(name="l", units=12, groups=4)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        (
            Kept((0, 1, 2), 12),
            r"has \('l', 'attention', 12, 12\) where the model has \('l', 'attention', 12, 4\); make",
        ),
        (
            Kept((0, 1, 2), 12, 4, "mlp"),
            r"it has \('l', 'mlp', 12, 4\) where the model has \('l', 'attention', 12, 4\)",
        ),
        (Kept((12,), 12, 4), r"must be ascending indices in \[0, 12\), got \[12\] for l"),
        (Kept((3, 3, 4), 12, 4), r"must be ascending indices .* got \[3, 3, 4\]"),
        (Kept((-1, 0), 12, 4), r"must be ascending indices in \[0, 12\)"),
        (Kept((0, 1, 2, 3), 12, 4), r"keep as many query heads as the others, but l keeps \[3, 1\]; cut"),
    ],
)
def test_kept_units_that_do_not_fit_a_module_are_refused(kept: Kept, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_selection({"l": kept}, [GROUPED])


def test_kept_units_that_are_even_over_their_groups_fit() -> None:
    for units in (tuple(range(12)), (11,), (3, 5, 9, 11)):
        check_selection({"l": Kept(units, 12, 4)}, [GROUPED])


def test_modules_must_be_all_there_and_in_order() -> None:
    modules = [Units(name=name, units=3, kind=kind) for name, kind in (("a", "attention"), ("b", "mlp"), ("c", "mlp"))]
    kept = {module.name: module.kept([0, 2]) for module in modules}
    check_selection(kept, modules)
    turned = {name: kept[name] for name in ("b", "a", "c")}
    with pytest.raises(PlanError, match=r"in the model's order, but it has \('b', .* where the model has \('a', "):
        check_selection(turned, modules)
    with pytest.raises(PlanError, match=r"it has None where the model has \('c', 'mlp', 3, 3\); make a plan for this"):
        check_selection({name: kept[name] for name in ("a", "b")}, modules)
    with pytest.raises(PlanError, match=r"it has \('z', 'mlp', 3, 3\) where the model has None"):
        check_selection({**kept, "z": kept["c"]}, modules)


def test_slim_models_can_be_copied_and_pickled() -> None:
    dense, batch = bert(), text_batch()
    slim, _, _ = random_cut(dense, batch)
    for other in (copy.deepcopy(slim), pickle.loads(pickle.dumps(slim))):
        assert type(other) is type(slim)
        assert_near(first_output(other, batch), first_output(slim, batch))


def test_layers_with_the_weight_of_a_cut_one_are_cut_too() -> None:
    model, batch = bert(), text_batch(labels=False)
    made = model.bert.encoder.layer[0].intermediate.dense
    model.other = torch.nn.Linear(made.in_features, made.out_features)
    model.other.weight, model.other.bias = made.weight, made.bias
    modules = find_modules(model, batch, kinds=("mlp",))
    slim = prune_units(model, random_neurons(modules, uniform=False), modules)
    cut = slim.bert.encoder.layer[0].intermediate.dense
    assert slim.other.weight is cut.weight
    assert len(cut.weight) < len(made.weight) == len(model.other.weight)
