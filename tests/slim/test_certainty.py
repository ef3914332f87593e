"""A cut language model is made as certain as the dense one, by one number."""

from collections.abc import Iterator

import pytest
import torch
from scipy.optimize import minimize_scalar
from support.architectures import tiny
from support.models import bert, causal_lm, llava, text_batch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export.model.copies import share_weights
from hies_export.model.linear import set_by_name
from hies_export.slim import certainty
from hies_export.slim.certainty import fit_logit_scale


def sure(model: PreTrainedModel) -> PreTrainedModel:
    """Return the model with larger logits, so that its predictions differ much from each other."""
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(8)
    return model


def noisy(model: PreTrainedModel, much: float = 0.5) -> PreTrainedModel:
    """Return a model that shares all weights but those of the last block's last layer, to which noise is added."""
    other = share_weights(model)
    head = other.get_output_embeddings().weight
    name, last = [(n, p) for n, p in other.named_parameters() if p.dim() == 2 and p is not head][-1]
    noise = torch.randn(last.shape, generator=torch.Generator().manual_seed(0))
    set_by_name(other, name, torch.nn.Parameter(last.detach() + much * last.std() * noise))
    return other


def texts(rows: int, *, seed: int, padded: bool = False) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(rows // 4):
        ids = torch.randint(5, 32, (4, 12), generator=generator)
        mask = torch.ones_like(ids)
        if padded:
            mask[0, 7:] = 0
        yield {"input_ids": ids, "attention_mask": mask}


def predictions(model: PreTrainedModel, batches: list[dict[str, Tensor]]) -> Tensor:
    """Return the logits in front of every real token but the first of a row, (predictions, vocabulary) float64."""
    found = []
    for batch in batches:
        logits = model(**batch).logits.detach().double()
        for row, mask in enumerate(batch["attention_mask"]):
            found += [logits[row, place - 1] for place in range(1, len(mask)) if mask[place]]
    return torch.stack(found)


def divergence(dense: Tensor, slim: Tensor) -> float:
    return (dense.softmax(-1) * (dense.log_softmax(-1) - slim.log_softmax(-1))).sum(-1).mean().item()


@pytest.mark.parametrize(("tied", "noise"), [(True, 2.0), (False, 0.3)])
@pytest.mark.parametrize("padded", [True, False])
def test_no_other_scale_is_nearer_to_the_dense_model(tied: bool, noise: float, padded: bool) -> None:
    dense = sure(causal_lm(tie_word_embeddings=tied)).eval()
    slim, batches = noisy(dense, noise), [*texts(16, seed=1, padded=padded)]
    there, here = predictions(dense, batches), predictions(slim, batches)
    best = minimize_scalar(lambda scale: divergence(there, scale * here), bounds=(0.7, 1.2), method="bounded").x
    before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
    scale, names = fit_logit_scale(dense, slim, batches)
    assert names == ["model.norm.weight"]
    assert scale == pytest.approx(best, abs=2e-3)
    assert 0.71 < scale < 1.19
    assert abs(scale - 1) > 0.01
    torch.testing.assert_close(predictions(slim, batches), scale * here, rtol=1e-4, atol=1e-4)
    assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


def test_only_the_first_rows_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    dense = sure(causal_lm()).eval()
    batches = [*texts(16, seed=1)]
    monkeypatch.setattr(certainty, "PREDICTIONS", 2 * 4 * 11)  # those of two batches of four rows
    first, _ = fit_logit_scale(dense, noisy(dense), batches[:2])
    assert fit_logit_scale(dense, noisy(dense), batches) == (first, ["model.norm.weight"])


def test_a_norm_that_adds_one_to_its_weight_is_left_alone() -> None:
    dense, _ = tiny("gemma", "GemmaForCausalLM")
    slim = noisy(dense)
    before = {name: tensor.clone() for name, tensor in slim.state_dict().items()}
    assert fit_logit_scale(dense, slim, [*texts(4, seed=1)]) == (1.0, [])
    assert all(torch.equal(before[name], tensor) for name, tensor in slim.state_dict().items())


@pytest.mark.parametrize("name", ["OPTForCausalLM", "GPT2LMHeadModel", "LlavaForConditionalGeneration"])
def test_other_decoders_are_scaled_where_their_last_norm_is(name: str) -> None:
    types = {"OPTForCausalLM": "opt", "GPT2LMHeadModel": "gpt2"}
    dense = sure(tiny(types[name], name)[0] if name in types else llava()).eval()
    slim = noisy(dense)
    scale, names = fit_logit_scale(dense, slim, [*texts(16, seed=1)])
    assert scale != 1
    assert {name.rpartition(".")[2] for name in names} <= {"weight", "bias"}
    batch = next(texts(4, seed=2))
    unscaled = noisy(dense)(**batch).logits
    torch.testing.assert_close(slim(**batch).logits, scale * unscaled, rtol=1e-4, atol=1e-4)


def test_a_classifier_is_left_alone() -> None:
    dense = bert()
    assert fit_logit_scale(dense, share_weights(dense), [text_batch(4, 8)]) == (1.0, [])
