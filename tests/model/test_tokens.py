"""How long a sequence may be, against what the models themselves can run."""

import pytest
import torch
import transformers
from support.models import SIX_HEADS, bert, causal_lm, llama, llava

from hies_export import RecipeError, RequestError, find_modules
from hies_export.model.tokens import (
    SHORT,
    longest_sequence,
    sample_batch,
    sequence_length,
    short_samples,
    synthetic_batch,
)
from hies_export.units.shapes import model_shapes

SMALL = SIX_HEADS | {"vocab_size": 50, "max_position_embeddings": 20}
# All of them begin to number positions behind the padding token's, at another place each.
OFFSET = [(name, 1) for name in ("Camembert", "Data2VecText", "IBert", "Lilt", "Luke", "MarkupLM", "MPNet", "Roberta")]
OFFSET += [(name, 1) for name in ("RobertaPreLayerNorm", "XLMRoberta", "XLMRobertaXL", "Xmod")]
OFFSET += [("Esm", 2), ("LayoutLMv3", 1), ("Roberta", 5)]


def tiny(name: str, **options: object) -> transformers.PreTrainedModel:
    model: type[transformers.PreTrainedModel] = getattr(transformers, f"{name}Model")
    boxes = {"coordinate_size": 8, "shape_size": 8, "input_size": 32}
    languages = {"entity_vocab_size": 10, "languages": ["en_XX"], "default_language": "en_XX"}
    extra = {"LayoutLMv3": boxes, "Luke": languages, "Xmod": languages}.get(name, {})
    return model(model.config_class(**SMALL, **extra, **options)).eval()


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
        assert model(**batch).last_hidden_state.shape == (2, 18, 48)
    with pytest.raises(RecipeError, match=r"sequence must be in 1\.\.18 for RobertaModel, got 19"):
        synthetic_batch(model, batch=2, sequence=19)
    assert model_shapes(model, ()) == [(1, 18), (8, 18)]
    with pytest.raises(RecipeError, match=r"sequence must be in 1\.\.18 for RobertaModel, got 20"):
        model_shapes(model, [(1, 20)])


def test_models_without_an_offset_take_all_their_positions_and_some_have_no_limit() -> None:
    assert longest_sequence(bert().config) == 64
    assert longest_sequence(causal_lm().config) == longest_sequence(llava().config) == 64
    assert longest_sequence(transformers.GPT2Config(n_positions=30)) == 30
    assert longest_sequence(transformers.T5Config()) is None
    assert longest_sequence(transformers.DebertaV2Config(max_position_embeddings=-1)) is None


def test_a_decoder_that_classifies_without_padding_gets_one_row() -> None:
    model = llama(pad_token_id=None)
    assert len(sample_batch(model, sequence=5)["input_ids"]) == 1
    alone = find_modules(model, sample_batch(model, sequence=5), kinds=("attention", "mlp"))
    model.config.pad_token_id = 0
    assert len(sample_batch(model, sequence=5)["input_ids"]) == 2
    assert find_modules(model, sample_batch(model, sequence=5), kinds=("attention", "mlp")) == alone


def test_multiple_choice_gets_one_choice_per_row() -> None:
    model = transformers.BertForMultipleChoice(bert().config).eval()
    batch = synthetic_batch(model, batch=3, sequence=5)
    assert batch["input_ids"].shape == (3, 1, 5)
    assert sequence_length(model, batch) == 5
    with torch.no_grad():
        assert model(**batch).logits.shape == (3, 1)


def test_tokens_that_stand_for_images_are_not_drawn() -> None:
    model = llava()
    ids = synthetic_batch(model, batch=8, sequence=64)["input_ids"]
    assert len(ids.unique()) == model.config.text_config.vocab_size - 1
    assert not (ids == model.config.image_token_id).any()


def test_models_of_sound_are_refused() -> None:
    model = transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2)
    )
    with pytest.raises(RequestError, match="models of text and of images, and Wav2Vec2Model takes input_values"):
        synthetic_batch(model, batch=2, sequence=8)


LONG = 3 * SHORT


def test_of_long_texts_tokens_that_are_padding_in_no_row_are_enough() -> None:
    ids, mask = torch.arange(3 * LONG).view(3, LONG), torch.ones(3, LONG, dtype=torch.int64)
    mask[0, : SHORT + 7] = 0  # on the left
    batch = {"input_ids": ids, "attention_mask": mask, "labels": torch.tensor([0, 1, 0])}
    found = short_samples(batch)
    assert torch.equal(found["input_ids"], ids[:2, SHORT + 7 : 2 * SHORT + 7])
    assert found["attention_mask"].shape == (2, SHORT)
    assert found["attention_mask"].all()
    assert found["labels"].tolist() == [0, 1]
    assert torch.equal(short_samples({"input_ids": ids})["input_ids"], ids[:2, :SHORT])


def test_what_is_not_by_token_and_what_has_too_few_tokens_stays_whole() -> None:
    ids, mask = torch.ones(2, LONG, dtype=torch.int64), torch.ones(2, LONG, dtype=torch.int64)
    images = {"input_ids": ids, "pixel_values": torch.rand(2, 3, 8, 8)}
    assert short_samples(images)["input_ids"].shape == (2, LONG)
    mask[1, SHORT - 1 :] = 0
    assert short_samples({"input_ids": ids, "attention_mask": mask})["input_ids"].shape == (2, LONG)
