"""How long a sequence may be, against what the models themselves can run."""

from __future__ import annotations

import pytest
import torch
import transformers
from support.models import bert, causal_lm, llava

from hies_export.errors import RecipeError
from hies_export.model.tokens import first_samples, longest_sequence, synthetic_batch
from hies_export.pipeline.bench import model_shapes

SMALL = {
    "vocab_size": 50,
    "hidden_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 20,
}
# All of them begin to number positions behind the padding token's, at another place each.
OFFSET = [
    ("Camembert", 1),
    ("Data2VecText", 1),
    ("Esm", 2),
    ("IBert", 1),
    ("Lilt", 1),
    ("Luke", 1),
    ("MarkupLM", 1),
    ("MPNet", 1),
    ("Roberta", 1),
    ("Roberta", 5),
    ("RobertaPreLayerNorm", 1),
    ("XLMRoberta", 1),
    ("XLMRobertaXL", 1),
    ("Xmod", 1),
]


def tiny(name: str, **options: object) -> transformers.PreTrainedModel:
    model: type[transformers.PreTrainedModel] = getattr(transformers, f"{name}Model")
    extra = {"entity_vocab_size": 10, "languages": ["en_XX"], "default_language": "en_XX"}
    config = model.config_class(**SMALL, **(extra if name in ("Luke", "Xmod") else {}), **options)
    return model(config).eval()


@pytest.mark.parametrize(("name", "pad"), OFFSET)
def test_the_longest_sequence_is_what_the_model_can_run(name: str, pad: int) -> None:
    model = tiny(name, pad_token_id=pad)
    longest = longest_sequence(model.config)
    assert longest == 20 - pad - 1
    ids = torch.full((1, longest + 1), 7)  # no padding among them
    with torch.no_grad():
        model(input_ids=ids[:, :-1])
        with pytest.raises((IndexError, RuntimeError), match="out of (range|bounds)"):
            model(input_ids=ids)


def test_a_synthetic_batch_is_refused_before_the_model_fails() -> None:
    model = tiny("Roberta", pad_token_id=1)
    batch = synthetic_batch(model, batch=2, sequence=18)
    with torch.no_grad():
        assert model(**batch).last_hidden_state.shape == (2, 18, 24)
    with pytest.raises(RecipeError, match=r"sequence must be in 1\.\.18 for RobertaModel, got 19"):
        synthetic_batch(model, batch=2, sequence=19)
    assert model_shapes(model, ()) == [(1, 18), (8, 18)]
    with pytest.raises(RecipeError, match=r"sequence must be in 1\.\.18 for RobertaModel, got 20"):
        model_shapes(model, [(1, 20)])


def test_models_without_an_offset_take_all_their_positions() -> None:
    assert longest_sequence(bert().config) == 64
    assert longest_sequence(causal_lm().config) == longest_sequence(llava().config) == 64
    assert longest_sequence(transformers.GPT2Config(n_positions=30)) == 30


@pytest.mark.parametrize("config", [transformers.T5Config(), transformers.DebertaV2Config(max_position_embeddings=-1)])
def test_models_without_a_limit(config: transformers.PreTrainedConfig) -> None:
    assert longest_sequence(config) is None


def test_first_samples() -> None:
    batch = {"input_ids": torch.arange(12).reshape(4, 3), "labels": torch.arange(4)}
    assert {key: value.tolist() for key, value in first_samples(batch).items()} == {
        "input_ids": [[0, 1, 2], [3, 4, 5]],
        "labels": [0, 1],
    }
