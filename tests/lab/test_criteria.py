"""The criteria of the lab by hand, and their statistics one head at a time."""

import pytest
import torch
from support.generative import padded, with_images
from support.models import bert, causal_lm, llava, shake, text_batch
from support.references import layer_tokens
from transformers import GPT2Config, GPT2LMHeadModel

from hies_export import (
    DataError,
    Statistics,
    collect_statistics,
    find_attention,
    find_modules,
    score_units,
    select_units,
)
from hies_export.calibrate.statistics import Calibration
from hies_export.kinds import ATTENTION, BOTH
from hies_export.score.criteria import CRITERIA, uses_alpha
from hies_export.units.units import Units
from hies_lab.baselines.channels import channel_taylor
from hies_lab.criteria import RIDGE

EXTRA = ("output_norm", "obs", "taylor")
CASES = {
    "bert": (bert, lambda: [text_batch(4, 10), text_batch(3, 12)]),
    "decoder": (causal_lm, lambda: [padded([9, 4, 6], "left", answers=[2, 3, 1]), padded([7, 5], "right")]),
    "llava": (
        llava,
        lambda: [with_images(padded([9, 4, 6], "left", answers=[2, 3, 1])), with_images(padded([7, 5], "right"))],
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_signals_equal_loops_over_samples_and_the_gradients_that_torch_leaves_in_weights(case: str) -> None:
    make, make_batches = CASES[case]
    model, batches = make(), make_batches()
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    sites = find_attention(model, batches[0])
    found = collect_statistics(model, batches, sites, needs=EXTRA)
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    for batch in batches:
        (model(**batch).loss * len(batch["input_ids"])).backward()
    names = ("query", "key", "value") if make is bert else ("q_proj", "k_proj", "v_proj")
    for site in sites:
        output = model.get_submodule(site.consumer)
        q, k, v = (model.get_submodule(f"{site.name}.{name}").weight for name in names)
        weight, width = output.weight.detach().double(), site.unit_width
        x = torch.cat(layer_tokens(model, site.consumer, batches)[0])
        moments = x.T @ x / len(x)
        moments = moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments))
        for head in range(site.units):
            group = head // site.group_size
            mine, shared = (slice(i * width, (i + 1) * width) for i in (head, group))
            written = (x[:, mine] @ weight[:, mine].T).norm(dim=-1).mean().item()
            assert found["output_norm"][site.name][head] == pytest.approx(written, rel=1e-4)
            # What is left of the head's inputs after a regression on the others: the Schur complement.
            rest = [i for i in range(len(moments)) if not mine.start <= i < mine.stop]
            others = torch.linalg.solve(moments[rest][:, rest], moments[rest][:, mine])
            left = moments[mine, mine] - moments[mine][:, rest] @ others
            error = (weight[:, mine] @ left @ weight[:, mine].T).trace().item()
            assert found["obs"][site.name][head] == pytest.approx(error, rel=1e-3)
            parts = [(q, mine), (k, shared), (v, shared)]
            salience = sum((w * w.grad).abs()[rows].sum().item() for w, rows in parts if w.grad is not None)
            if output.weight.grad is not None:
                salience += (output.weight * output.weight.grad).abs()[:, mine].sum().item()
            assert found["taylor"][site.name][head] == pytest.approx(salience, rel=1e-3)
    if make is llava:
        # LLaVA reads the image tower before its last layer, which therefore moves no loss.
        towers = {site.name: found["taylor"][site.name].sum() > 0 for site in sites}
        assert [name for name, moves in towers.items() if not moves] == [[n for n in towers if "vision" in n][-1]]


@pytest.mark.parametrize("kind", BOTH)
def test_weights_that_are_stored_transposed_have_the_signals_of_their_own_units(kind: str) -> None:
    """Every layer of a GPT-2 is a Conv1D, whose weight is stored (inputs, outputs): a unit reads columns, not rows.

    Square weights fit both ways.
    """
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 32, "vocab_size": 32, "n_positions": 64}
    model = shake(GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=2, eos_token_id=3)))
    batches = [padded([9, 4, 6], "left", answers=[2, 3, 1]), padded([7, 5], "right")]
    modules = find_modules(model, batches[0], kinds=(kind,))
    needs = {"taylor": 1, "weight_l2": 2} | ({"channels": 1} if kind == ATTENTION else {})
    found = dict(collect_statistics(model, batches, modules, needs=["taylor"]).values)
    found["channels"] = channel_taylor(model, batches, modules) if kind == ATTENTION else {}
    for batch in batches:
        (model(**batch).loss * len(batch["input_ids"])).backward()
    for module in modules:
        (producer,) = (model.get_submodule(name).weight for name in module.producers)
        consumer = model.get_submodule(module.consumer).weight
        for what, root in needs.items():
            into, out = (
                w.detach().double().pow(2) if what == "weight_l2" else (w * w.grad).abs().double()
                for w in (producer, consumer)
            )
            # By feature: the columns of q, k and v, or of a neuron, and the row that reads them.
            by_feature = into.sum(0).view(-1, len(out)).sum(0) + out.sum(1)
            width = 1 if what == "channels" else module.unit_width
            expected = by_feature.view(-1, width).sum(1) ** (1 / root)
            torch.testing.assert_close(found[what][module.name], expected, rtol=1e-4, atol=1e-9)


def test_gradients_of_weights_need_the_labels_of_a_language_model() -> None:
    model, batch = causal_lm(), padded([8, 6], "right")
    del batch["labels"]
    sites = find_attention(model, batch)
    with pytest.raises(DataError, match="needs labels"):
        collect_statistics(model, [batch], sites, needs=["taylor"])


def statistics(**values: dict[str, list[float]]) -> Statistics:
    tensors = {
        name: {module: torch.tensor(row, dtype=torch.float64) for module, row in rows.items()}
        for name, rows in values.items()
    }
    return Statistics(tensors, Calibration(4, "data", "0" * 64))


def test_they_come_by_entry_points_and_scale_their_statistic() -> None:
    assert {"output-norm", "obs", "llm-pruner-block", "ae + activation-l2"} <= set(CRITERIA)
    assert uses_alpha("ae + activation-l2")
    rows = {"a": [1.0, 3.0], "b": [2.0, 5.0]}
    for name, statistic in (("output-norm", "output_norm"), ("obs", "obs")):
        found = score_units(statistics(**{statistic: rows}), criterion=name).scores
        assert {module: row.tolist() for module, row in found.items()} == {"a": [0, 0.5], "b": [0.25, 1]}
    given = statistics(activation_l2=rows, entropy={"a": [0.2, 0.4], "b": [0.6, 1.0]})
    found = score_units(given, criterion="ae + activation-l2", alpha=0.25).scores
    # The norm is (s - 1) / 4, the entropy (e - 0.2) / 0.8.
    torch.testing.assert_close(found["a"], torch.tensor([0.75, 0.25 * 0.5 + 0.75 * 0.75], dtype=torch.float64))


@pytest.mark.parametrize(("layers", "kept"), [(7, []), (8, [0, 1, 2, 7]), (9, [0, 1, 2, 8])])
def test_llm_pruner_spares_the_first_layers_and_the_last_of_deep_models(layers: int, kept: list[int]) -> None:
    given = statistics(taylor={f"l{i}": [float(i), float(i + 1)] for i in range(layers)})
    found = score_units(given, criterion="llm-pruner-block").scores
    for i, row in enumerate(found.values()):
        expected = torch.tensor([i, i + 1], dtype=torch.float64) / layers + (2.0 if i in kept else 0.0)
        torch.testing.assert_close(row, expected)


@pytest.mark.parametrize("spared", [0, 2, 7])
@pytest.mark.parametrize("best", [3, 5, 6])
def test_llm_pruner_takes_the_best_of_the_others_before_the_worst_that_is_spared(spared: int, best: int) -> None:
    """The worst head is in a layer that is spared, and the best two in another one; each keeps one of them."""
    rows = {f"l{i}": [0.4, 0.5] for i in range(8)} | {f"l{spared}": [0.0, 0.5], f"l{best}": [1.0, 1.0]}
    scores = score_units(statistics(taylor=rows), criterion="llm-pruner-block")
    modules = [Units(name=name, units=2) for name in rows]
    kept = select_units(scores, modules, heads=4 / 16)
    assert [name for name, of in kept.items() if of.removed] == ["l3", "l4", "l5", "l6"]
    # Of equal heads the last goes first, as under every criterion; the next to go is the worst of those spared.
    assert kept[f"l{best}"].removed == (1,)
    further = select_units(scores, modules, heads=5 / 16)
    assert [name for name, of in further.items() if of.removed] == sorted({"l3", "l4", "l5", "l6", f"l{spared}"})
