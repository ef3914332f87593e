"""Modules that lose their last head or neuron, against models in which they are replaced by hand."""

import copy
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from support.architectures import tiny
from support.models import bert, causal_lm, image_batch, text_batch, vit
from support.tolerance import assert_near
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForSequenceClassification, PreTrainedModel

from hies_export import (
    Compensation,
    Constraints,
    PruningPlan,
    Selection,
    apply_plan,
    compensate,
    count_flops,
    export_onnx,
    find_modules,
    flops_table,
    load,
    parameters_table,
    prune,
    prune_units,
    save_slim,
)
from hies_export.errors import RecipeError, UnsupportedModelError
from hies_export.kinds import KINDS
from hies_export.select.constraints import check_constraints
from hies_export.slim.check import compare_cut, first_output
from hies_export.units.units import PrunableModule

TEXT = text_batch(labels=False)
TOKENS = {"input_ids": torch.arange(5, 27).view(2, 11)}
Modules = tuple[PrunableModule, ...]


class Blank(nn.Module):
    """Stands for a module: zeros of some width for every token, in a tuple with nothing else if it is attention."""

    def __init__(self, width: int, *, pair: bool):
        super().__init__()
        self.width, self.pair = width, pair

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        zeros = hidden_states.new_zeros(*hidden_states.shape[:-1], self.width)
        return (zeros, None) if self.pair else zeros


def skipping(model: PreTrainedModel, batch: dict[str, Tensor], *names: str) -> tuple[Selection, Modules]:
    """Return the selection without all units of the named modules."""
    modules = find_modules(model, batch, kinds=KINDS)
    assert {*names} <= {module.name for module in modules}
    return {m.name: m.kept(() if m.name in names else range(m.units)) for m in modules}, modules


def bert_case() -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Tensor], tuple[str, ...]]:
    """Return a BERT, the same with modules replaced by hand, a batch, and the names of these modules."""
    dense = bert(num_hidden_layers=2)
    by_hand: Any = copy.deepcopy(dense)
    by_hand.bert.encoder.layer[1].attention.self = Blank(48, pair=True)
    by_hand.bert.encoder.layer[0].intermediate = Blank(64, pair=False)
    return dense, by_hand, TEXT, ("bert.encoder.layer.1.attention.self", "bert.encoder.layer.0")


def llama_case() -> tuple[PreTrainedModel, PreTrainedModel, dict[str, Tensor], tuple[str, ...]]:
    """Return the same of a LLaMA without the attention of its first layer, whose projections have no bias."""
    dense = causal_lm()
    by_hand: Any = copy.deepcopy(dense)
    width = dense.config.hidden_size
    by_hand.model.layers[0].self_attn = Blank(width, pair=True)
    by_hand.model.layers[1].mlp = Blank(width, pair=False)
    return dense, by_hand, TOKENS, ("model.layers.0.self_attn", "model.layers.1.mlp")


CASES = pytest.mark.parametrize("case", [bert_case, llama_case])


@CASES
def test_a_skipped_module_gives_the_bias_of_its_consumer(case: Callable[[], Any], tmp_path: Path) -> None:
    dense, by_hand, batch, names = case()
    kept, modules = skipping(dense, batch, *names)
    slim = prune_units(dense, kept, modules)
    expected = first_output(by_hand, batch)
    assert (expected - first_output(dense, batch)).abs().max() > 1e-3
    assert_near(first_output(slim, batch), expected)
    assert compare_cut(dense, slim, kept, modules, batch) < 2e-6
    dense.save_pretrained(tmp_path / "dense")
    plan = PruningPlan(kept=kept, criterion="random")
    save_slim(slim, tmp_path / "slim", plan=plan, batch=batch)
    apply_plan(PruningPlan.from_file(tmp_path / "slim" / "hies_plan.json"), tmp_path / "dense", tmp_path / "applied")
    for name in ("slim", "applied"):
        again = load(tmp_path / name)
        assert_near(first_output(again, batch), expected)
        states = AutoModel.from_pretrained(tmp_path / name, trust_remote_code=True)
        assert_near(first_output(states, batch), first_output(by_hand.base_model, batch))
    # The rest can be cut again, and trained.
    left = find_modules(again, batch, kinds=KINDS)
    assert {module.name for module in left} == {module.name for module in modules} - {*names}
    half = {m.name: m.kept(u for u in range(m.units) if u // m.group_size % 2 == 0) for m in left}
    assert compare_cut(again, prune_units(again, half, left), half, left, batch) < 2e-6
    again.train()(**batch).logits.sum().backward()


@CASES
def test_a_skipped_module_costs_nothing(case: Callable[[], Any]) -> None:
    dense, by_hand, batch, names = case()
    kept, modules = skipping(dense, batch, *names)
    slim = prune_units(dense, kept, modules)
    lost = {module.name: module.groups for module in modules if module.name in names}
    flops, parameters = flops_table(dense, modules, batch=batch), parameters_table(dense, modules)
    share = count_flops(slim, batch) / count_flops(dense, batch)
    assert flops.ratio(lost) == pytest.approx(share, abs=1e-12)
    sizes = [sum(p.numel() for p in {id(p): p for p in m.parameters()}.values()) for m in (slim, dense)]
    assert parameters.ratio(lost) == pytest.approx(sizes[0] / sizes[1], abs=1e-12)
    if case is llama_case:  # by hand, BERT's consumers still multiply zeros
        assert count_flops(slim, batch) == count_flops(by_hand, batch)


def test_a_single_group_of_heads_costs_all_that_its_module_does() -> None:
    dense = causal_lm(num_key_value_heads=1)
    modules = find_modules(dense, TOKENS)
    name = modules[0].name
    slim = prune_units(dense, skipping(dense, TOKENS, name)[0], find_modules(dense, TOKENS, kinds=KINDS))
    ratio = flops_table(dense, modules, batch=TOKENS).ratio({name: 1})
    assert ratio == pytest.approx(count_flops(slim, TOKENS) / count_flops(dense, TOKENS), abs=1e-12)


@pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")
@pytest.mark.parametrize("sequential", [False, True])
def test_a_refit_replaces_a_module_by_its_mean(sequential: bool) -> None:
    dense, _, _, names = bert_case()
    batches = [text_batch(8, labels=False) for _ in range(2)]
    kept, modules = skipping(dense, batches[0], *names)
    seen: dict[str, list[Tensor]] = {name: [] for name in names}
    hooks = [
        dense.get_submodule(module.consumer).register_forward_hook(
            lambda layer, args, output, name=module.name: seen[name].append(output.flatten(0, 1))
        )
        for module in modules
        if module.name in names
    ]
    for batch in batches:
        dense.eval()(**batch)
    for hook in hooks:
        hook.remove()
    real = torch.cat([batch["attention_mask"].flatten() for batch in batches]).bool()
    slim = prune_units(dense, kept, modules)
    fits = compensate(dense, slim, kept, modules, batches, Compensation(sequential=sequential))
    assert {fit.name: fit.method for fit in fits} == dict.fromkeys([m.name for m in modules if m.name in names], "bias")
    skipped = sorted([module for module in modules if module.name in names], key=lambda one: one.consumer)
    for module in skipped[: 1 if sequential else None]:
        # Layer by layer, those behind the first also make up for what the stream lacks.
        mean = torch.cat(seen[module.name])[real].mean(0)
        assert_near(slim.get_submodule(module.consumer).bias, mean)


@CASES
def test_a_graph_has_no_node_of_a_skipped_module(case: Callable[[], Any], tmp_path: Path) -> None:
    dense, _, batch, names = case()
    kept, modules = skipping(dense, batch, *names)
    exported = export_onnx(prune_units(dense, kept, modules), tmp_path / "slim", batch=batch)
    assert exported.max_abs < 1e-5
    graph = onnx.load(exported.file).graph
    assert not any(0 in tensor.dims for tensor in graph.initializer)
    found = Counter(node.op_type for node in graph.node)
    # Of two layers there is one attention, in one, and one feed-forward block, in the other.
    if case is bert_case:
        wanted = {"MatMul": 4 + 2, "MultiHeadAttention": 1, "BiasGelu": 1}
    else:
        # Queries, keys and values are one product, and so are gate and up; attention is two products and a softmax.
        wanted = {"MatMul": 2 + 2 + 2 + 1, "Softmax": 1, "Sigmoid": 1}
    assert {name: found[name] for name in wanted} == wanted


def test_a_cache_counts_the_tokens_of_a_skipped_first_layer() -> None:
    dense, cacheless, batch, names = llama_case()
    by_hand: Any = cacheless
    kept, modules = skipping(dense, batch, *names)
    slim: Any = prune_units(dense, kept, modules)
    how = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    ids = batch["input_ids"]
    by_hand.config.use_cache = False
    assert torch.equal(slim.generate(ids, **how), by_hand.generate(ids, **how, use_cache=False))


@pytest.mark.parametrize("model_type", ["vit", "gpt2", "mpnet", "deberta-v2", "distilbert", "phi3", "qwen3"])
def test_other_families_skip_too(model_type: str) -> None:
    """Fused and transposed projections, norms in front, norms of single heads, and other returns."""
    model, batch = tiny(model_type)
    modules = find_modules(model, batch, kinds=KINDS)
    first = {kind: next(module.name for module in modules if module.kind == kind) for kind in KINDS}
    kept, modules = skipping(model, batch, *first.values())
    slim = prune_units(model, kept, modules)
    assert compare_cut(model, slim, kept, modules, batch) < 2e-6
    assert count_flops(slim, batch) < 0.7 * count_flops(model, batch)


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [("albert", "computes more after .*attention.dense"), ("t5", "is part of an encoder-decoder")],
)
def test_attention_that_cannot_be_skipped_is_refused_by_name(model_type: str, reason: str) -> None:
    model, batch = tiny(model_type)
    name = find_modules(model, batch)[0].name
    modules = find_modules(model, batch)
    kept = {m.name: m.kept(() if m.name == name else range(m.units)) for m in modules}
    with pytest.raises(UnsupportedModelError, match=f"{name} {reason}; set min_heads to at least 1"):
        prune_units(model, kept, modules)


def test_query_heads_of_groups_cannot_all_go() -> None:
    modules = find_modules(causal_lm(), TOKENS)
    check_constraints(modules, Constraints(min_heads=0))
    with pytest.raises(RecipeError, match="min_heads 0 needs unit: group"):
        check_constraints(modules, Constraints(min_heads=0, unit="query"))


@pytest.mark.parametrize("make", [bert, vit])
def test_whole_modules_go_where_units_may_only_go_together(make: Callable[[], Any]) -> None:
    """With `multiple_of` as large as a module, it stays or goes; without a limit both are possible."""
    model = make()
    batches = [text_batch(8) if make is bert else image_batch(8) for _ in range(4)]
    sizes = {module.kind: module.units for module in find_modules(model, batches[0], kinds=KINDS)}
    found = {}
    for way, multiple in (("depth", {"heads": sizes["attention"], "neurons": sizes["mlp"]}), ("both", 1)):
        found[way] = prune(
            model,
            batches,
            modules=("attention", "mlp"),
            criterion="his",
            budget={"flops": 0.6},
            compensation=None,
            min_heads=0,
            min_neurons=0,
            multiple_of=multiple,
            held_out=[],
            shape=(8, batches[0]["input_ids"].shape[1]) if make is bert else (8,),
        )
    counts = [(len(kept.units), kept.total) for kept in found["depth"].plan.kept.values()]
    assert {kept for kept, _ in counts} - {total for _, total in counts} == {0}
    assert all(kept in (0, total) for kept, total in counts)
    for result in found.values():
        assert count_flops(result.model, batches[0]) <= 0.6 * count_flops(model, batches[0])


def test_a_slim_folder_loads_without_this_package(tmp_path: Path) -> None:
    dense, by_hand, batch, names = bert_case()
    kept, modules = skipping(dense, batch, *names)
    plan = PruningPlan(kept=kept, criterion="random")
    save_slim(prune_units(dense, kept, modules), tmp_path / "slim", plan=plan, batch=batch)
    alone = AutoModelForSequenceClassification.from_pretrained(tmp_path / "slim", trust_remote_code=True)
    assert not type(alone).__module__.startswith("hies_export")
    assert_near(first_output(alone, batch), first_output(by_hand, batch))
