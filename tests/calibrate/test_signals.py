from typing import Any

import pytest
import torch
from support.generative import padded, unpadded, with_images
from support.models import bert, causal_lm, llama, llava, text_batch
from torch import Tensor

from hies_export.calibrate.collect import collect_statistics
from hies_export.calibrate.inputs import RIDGE
from hies_export.errors import DataError, RecipeError
from hies_export.prunable.attention import find_attention
from hies_export.score.criteria import CRITERIA, min_max, score_units

EXTRA = ("activation_l2", "output_norm", "obs", "taylor")


def read_by_output(model: Any, site: Any, batches: list[dict[str, Tensor]]) -> list[Tensor]:
    """Every real token's input of the output projection, one by one."""
    seen: list[Tensor] = []
    handle = model.get_submodule(site.consumer).register_forward_hook(lambda m, x, y: seen.append(x[0]))
    tokens = []
    for batch in batches:
        model(**{k: v for k, v in batch.items() if k != "labels"})
        x = seen.pop()
        for row in range(len(x)):
            for token in range(x.shape[1]):
                if batch["attention_mask"][row, token]:
                    tokens.append(x[row, token].detach().double())
    handle.remove()
    return tokens


@pytest.mark.parametrize("make", [bert, llama])
def test_signals_equal_loops_over_tokens_and_weights(make: Any) -> None:
    model = make()
    batches = [text_batch(4, 10), text_batch(3, 12)]
    before = {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()}
    sites = find_attention(model, batches[0])
    found = collect_statistics(model, batches, sites, needs=EXTRA)
    assert {name: (p.requires_grad, p.grad) for name, p in model.named_parameters()} == before
    for batch in batches:
        (model(**batch).loss * len(batch["labels"])).backward()
    for site in sites:
        weight = model.get_submodule(site.consumer).weight.detach().double()
        tokens = read_by_output(model, site, batches)
        moments = sum(torch.outer(x, x) for x in tokens) / len(tokens)
        moments = moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments))
        width = site.unit_width
        attention = model.get_submodule(site.name)
        for head in range(site.units):
            columns = list(range(head * width, (head + 1) * width))
            rest = [i for i in range(len(moments)) if i not in columns]
            norms = [x[columns].norm() for x in tokens]
            assert found["activation_l2"][site.name][head] == pytest.approx(float(sum(norms)) / len(tokens), rel=1e-5)
            written = [(weight[:, columns] @ x[columns]).norm() for x in tokens]
            assert found["output_norm"][site.name][head] == pytest.approx(float(sum(written)) / len(tokens), rel=1e-5)
            # What is left of the head's inputs after a regression on the others: the Schur complement.
            left = moments[columns][:, columns] - moments[columns][:, rest] @ torch.linalg.solve(
                moments[rest][:, rest], moments[rest][:, columns]
            )
            error = (weight[:, columns] @ left @ weight[:, columns].T).trace()
            assert found["obs"][site.name][head] == pytest.approx(error.item(), rel=1e-4)
            group = head // site.group_size
            taylor = 0.0
            if make is bert:
                parts = [(getattr(attention, n), columns, 0) for n in ("query", "key", "value")]
            else:
                shared = list(range(group * width, (group + 1) * width))
                parts = [(attention.q_proj, columns, 0), (attention.k_proj, shared, 0), (attention.v_proj, shared, 0)]
            for layer, rows, _ in [*parts, (model.get_submodule(site.consumer), columns, 1)]:
                product = (layer.weight * layer.weight.grad).detach().abs()
                taylor += float((product[rows] if _ == 0 else product[:, rows]).sum())
            assert found["taylor"][site.name][head] == pytest.approx(taylor, rel=1e-3)


@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("make", [causal_lm, llava])
def test_signals_of_decoders_and_of_both_towers(make: Any, side: str) -> None:
    """Norms against unpadded samples one at a time; weights against the gradients that torch leaves in them."""
    model, batches = make(), [padded([9, 4, 6], side, answers=[2, 3, 1]), padded([7, 5], side)]
    if make is llava:
        batches = [with_images(batch) for batch in batches]
    sites = find_attention(model, batches[0])
    found = collect_statistics(model, batches, sites, needs=EXTRA)
    read: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    for site in sites:
        model.get_submodule(site.consumer).register_forward_hook(
            lambda layer, x, y, name=site.name: read[name].append(x[0].detach().double().flatten(0, -2))
        )
    for sample in unpadded(batches):
        model(**{key: value for key, value in sample.items() if key != "labels"})
    tokens = {name: torch.cat(inputs) for name, inputs in read.items()}
    for batch in batches:
        (model(**batch).loss * len(batch["input_ids"])).backward()
    for site in sites:
        output = model.get_submodule(site.consumer)
        heads = tokens[site.name].unflatten(1, (site.units, -1))
        torch.testing.assert_close(found["activation_l2"][site.name], heads.norm(dim=-1).mean(0), rtol=1e-4, atol=0)
        by_head = output.weight.detach().double().unflatten(1, (site.units, -1))
        written = torch.einsum("thd,ohd->tho", heads, by_head).norm(dim=-1).mean(0)
        torch.testing.assert_close(found["output_norm"][site.name], written, rtol=1e-4, atol=0)
        for head in range(site.units):
            mine = slice(head * site.unit_width, (head + 1) * site.unit_width)
            group = head // site.group_size
            shared = slice(group * site.unit_width, (group + 1) * site.unit_width)
            q, k, v = (model.get_submodule(f"{site.name}.{name}_proj").weight for name in "qkv")
            parts = [(q, mine), (k, shared), (v, shared)]
            salience = sum((w * w.grad).abs()[rows].sum().item() for w, rows in parts if w.grad is not None)
            if output.weight.grad is not None:
                salience += (output.weight * output.weight.grad).abs()[:, mine].sum().item()
            assert found["taylor"][site.name][head] == pytest.approx(salience, rel=1e-3)
    if make is llava:
        # LLaVA reads the image tower before its last layer, which therefore moves no loss.
        towers = {site.name: found["taylor"][site.name].sum() > 0 for site in sites}
        assert [name for name, moves in towers.items() if not moves] == [[n for n in towers if "vision" in n][-1]]


def test_every_baseline_scores_by_its_signal() -> None:
    model, batches = bert(num_hidden_layers=8), [text_batch(4, 10)]
    sites = find_attention(model, batches[0])
    statistics = collect_statistics(model, batches, sites)
    for name in ("activation-l2", "output-norm", "obs", "llm-pruner-block", "ae + activation-l2"):
        missing = next(need for need in CRITERIA[name].needs if need in EXTRA)
        with pytest.raises(RecipeError, match=f"needs statistics with {missing}; collect them with collect_statistics"):
            score_units(statistics, criterion=name)
    statistics = collect_statistics(model, batches, sites, needs=EXTRA)

    def scores(name: str, **options: float) -> Tensor:
        return torch.stack(list(score_units(statistics, criterion=name, **options).scores.values()))  # type: ignore[arg-type]

    norm = torch.stack(list(statistics["activation_l2"].values()))
    spread = (norm - norm.min()) / (norm.max() - norm.min())
    assert torch.allclose(scores("activation-l2"), spread)
    entropy = torch.stack(list(min_max(statistics["entropy"], normalize="model", what="").values()))
    assert torch.allclose(scores("ae + activation-l2", alpha=0.3), 0.3 * spread + 0.7 * (1 - entropy))
    block = scores("llm-pruner-block")
    assert block[[0, 1, 2, 7]].min() >= 1 > block[3:7].min()
    assert torch.equal(scores("obs").flatten().argsort(), torch.cat(list(statistics["obs"].values())).argsort())


def test_bad_input_is_refused() -> None:
    model = causal_lm()
    batch = text_batch(2, 8, labels=False)
    batch["input_ids"] %= 32
    sites = find_attention(model, batch)
    with pytest.raises(DataError, match="needs labels"):
        collect_statistics(model, [batch], sites, needs=["taylor"])
    with pytest.raises(DataError, match="at least one sample"):
        collect_statistics(model, [], sites, needs=["obs"])
