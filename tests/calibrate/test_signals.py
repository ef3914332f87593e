"""Statistics of weights and of what consumers read, one head at a time."""

import pytest
import torch
from support.generative import padded, with_images
from support.models import bert, causal_lm, llama, llava, text_batch
from support.neurons import one_by_one
from torch import Tensor

from hies_export.calibrate.collect import collect_statistics
from hies_export.calibrate.inputs import RIDGE
from hies_export.errors import DataError
from hies_export.prunable.attention import find_attention

EXTRA = ("activation_l2", "output_norm", "obs", "taylor")


CASES = {
    "bert": (bert, lambda: [text_batch(4, 10), text_batch(3, 12)]),
    "llama": (llama, lambda: [text_batch(4, 10), text_batch(3, 12)]),
    "decoder right": (causal_lm, lambda: [padded([9, 4, 6], "right", answers=[2, 3, 1]), padded([7, 5], "right")]),
    "decoder left": (causal_lm, lambda: [padded([9, 4, 6], "left", answers=[2, 3, 1]), padded([7, 5], "left")]),
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
    read: dict[str, list[Tensor]] = {site.name: [] for site in sites}
    for site in sites:
        model.get_submodule(site.consumer).register_forward_hook(
            lambda layer, x, y, name=site.name: read[name].append(x[0].detach().double().flatten(0, -2))
        )
    for sample in one_by_one(batches):
        model(**{key: value for key, value in sample.items() if key != "labels"})
    tokens = {name: torch.cat(inputs) for name, inputs in read.items()}
    for batch in batches:
        (model(**batch).loss * len(batch["input_ids"])).backward()
    names = ("query", "key", "value") if make is bert else ("q_proj", "k_proj", "v_proj")
    for site in sites:
        output = model.get_submodule(site.consumer)
        q, k, v = (model.get_submodule(f"{site.name}.{name}").weight for name in names)
        weight, width = output.weight.detach().double(), site.unit_width
        x = tokens[site.name]
        moments = x.T @ x / len(x)
        moments = moments + RIDGE * moments.diagonal().mean() * torch.eye(len(moments))
        for head in range(site.units):
            group = head // site.group_size
            mine, shared = (slice(i * width, (i + 1) * width) for i in (head, group))
            norm = x[:, mine].norm(dim=-1).mean().item()
            assert found["activation_l2"][site.name][head] == pytest.approx(norm, rel=1e-4)
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


def test_gradients_of_weights_need_the_labels_of_a_language_model() -> None:
    model = causal_lm()
    batch = text_batch(2, 8, labels=False)
    batch["input_ids"] %= 32
    sites = find_attention(model, batch)
    with pytest.raises(DataError, match="needs labels"):
        collect_statistics(model, [batch], sites, needs=["taylor"])
