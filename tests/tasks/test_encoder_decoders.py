"""Encoder-decoders beside loops over single texts: what is scored, predicted, cut, saved and generated; refusals."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from support.architectures import tiny
from support.models import shake, word_tokenizer
from support.references import naive_statistics
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    DataCollatorForSeq2Seq,
    EncoderDecoderConfig,
    EncoderDecoderModel,
    MarianConfig,
    MarianMTModel,
    MvpConfig,
    MvpForConditionalGeneration,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

from hies_export import (
    DataError,
    PruneResult,
    PruningRecipe,
    RecipeError,
    RequestError,
    UnsupportedModelError,
    collect_statistics,
    compare_cut,
    find_modules,
    load,
    prune,
)
from hies_export.evaluate.predict import predict
from hies_export.model.attention import on_interface
from hies_export.tasks import TASKS
from hies_export.tasks.registry import task_by_class, task_of

Batch = dict[str, Tensor]
BOTH: Any = ["attention", "mlp"]
SIZES: Any = {
    **{"vocab_size": 60, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2},
    **{"encoder_ffn_dim": 48, "decoder_ffn_dim": 40, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
}


def t5() -> PreTrainedModel:
    sizes: Any = {"vocab_size": 60, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    tokens: Any = {"decoder_start_token_id": 0, "pad_token_id": 0}
    return shake(T5ForConditionalGeneration(T5Config(**sizes, **tokens)))


def bart() -> PreTrainedModel:
    tokens: Any = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    options: Any = {"max_position_embeddings": 32, "forced_eos_token_id": None}
    return shake(BartForConditionalGeneration(BartConfig(**SIZES, **tokens, **options)))


def marian() -> PreTrainedModel:
    tokens: Any = {"pad_token_id": 59, "eos_token_id": 0, "decoder_start_token_id": 59, "forced_eos_token_id": None}
    model = MarianMTModel(MarianConfig(**SIZES, **tokens, max_position_embeddings=32))
    computed = {name: value.clone() for name, value in model.state_dict().items() if "embed_positions" in name}
    shake(model).load_state_dict(computed, strict=False)  # positions are computed, not saved
    return model


def whisper() -> PreTrainedModel:
    tokens: Any = {"pad_token_id": 57, "bos_token_id": 57, "eos_token_id": 57, "decoder_start_token_id": 58}
    sizes: Any = {"num_mel_bins": 8, "max_source_positions": 12, "max_target_positions": 32}
    never: Any = {"suppress_tokens": None, "begin_suppress_tokens": None}
    return shake(WhisperForConditionalGeneration(WhisperConfig(**SIZES, **tokens, **sizes, **never)))


MODELS = {make.__name__: make for make in (t5, bart, marian, whisper)}


# What Marian computes BART does, but for its positions.
@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=pytest.mark.architectures if name == "marian" else ()) for name in MODELS],
)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    torch.manual_seed(0)
    return MODELS[request.param]()


def batch_of(model: PreTrainedModel, seed: int, *, target: int = 7, labels: bool = True) -> Batch:
    """Return four samples; sources of up to 7 tokens and targets are padded, unless the sources are speech."""
    generator = torch.Generator().manual_seed(seed)

    def draw(width: int, fill: int) -> tuple[Tensor, Tensor]:
        mask = torch.arange(width) < torch.randint(3, width + 1, (4, 1), generator=generator)
        return torch.randint(5, 50, (4, width), generator=generator).masked_fill(~mask, fill), mask.long()

    found = {"labels": draw(target, -100)[0]} if labels else {}
    if model.main_input_name == "input_features":
        return {"input_features": torch.randn(4, 8, 24, generator=generator), **found}
    ids, mask = draw(7, model.config.pad_token_id)
    return {"input_ids": ids, "attention_mask": mask, **found}


def batches_of(model: PreTrainedModel, count: int = 4, **options: Any) -> list[Batch]:
    return [batch_of(model, seed, **options) for seed in range(count)]


def canonical(model: PreTrainedModel, batches: Sequence[Batch]) -> list[Batch]:
    return [task_of(model).canonical(model, batch) for batch in batches]


def alone(batches: Sequence[Batch]) -> list[Batch]:
    """Return every sample as a batch of its own, without padding."""
    found = []
    for batch in batches:
        for row in range(len(batch["labels"])):
            one = {key: value[row : row + 1] for key, value in batch.items()}
            if "attention_mask" in one:
                real = one["attention_mask"][0] != 0
                one |= {key: one[key][:, real] for key in ("input_ids", "attention_mask")}
            found.append({**one, "labels": one["labels"][:, one["labels"][0] != -100]})
    return found


def wider(model: PreTrainedModel, batches: Sequence[Batch]) -> list[Batch]:
    """Return the batches with two places of padding more behind sources and targets."""
    fill = {"input_ids": model.config.pad_token_id, "attention_mask": 0, "labels": -100}
    return [
        {
            key: torch.cat([value, torch.full((len(value), 2), fill[key])], 1) if key in fill else value
            for key, value in batch.items()
        }
        for batch in batches
    ]


def test_units_of_encoder_and_decoder_are_found(model: PreTrainedModel) -> None:
    names = [module.name for module in find_modules(model, canonical(model, batches_of(model))[0], kinds=BOTH)]
    if isinstance(model, T5ForConditionalGeneration):
        # Layers whose bias of every head others take keep their heads: the first ones.
        heads = [
            *("encoder.block.1.layer.0.SelfAttention", "decoder.block.1.layer.0.SelfAttention"),
            "decoder.block.1.layer.1.EncDecAttention",
        ]
        neurons = [f"encoder.block.{i}.layer.1.DenseReluDense" for i in (0, 1)]
        assert names == [*heads, *neurons, *(f"decoder.block.{i}.layer.2.DenseReluDense" for i in (0, 1))]
        return
    of_decoder = [f"model.decoder.layers.{i}.{kind}" for i in (0, 1) for kind in ("self_attn", "encoder_attn")]
    layers = [f"model.{part}.layers.{i}" for part in ("encoder", "decoder") for i in (0, 1)]
    assert names == [*(f"model.encoder.layers.{i}.self_attn" for i in (0, 1)), *of_decoder, *layers]


def test_importance_and_entropy_are_those_of_each_sample_by_itself(model: PreTrainedModel) -> None:
    assert_statistics(model)


def test_so_they_are_where_the_attention_is_a_models_own_code() -> None:
    torch.manual_seed(4)
    tokens: Any = {"pad_token_id": 1, "bos_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 2}
    model = shake(MvpForConditionalGeneration(MvpConfig(**SIZES, **tokens, max_position_embeddings=32)))
    assert not on_interface(model)
    assert_statistics(model)


def assert_statistics(model: PreTrainedModel) -> None:
    """Compare with a loop. Sources and targets have as many places, so that neither mask is taken for the other's."""
    batches = batches_of(model)
    inputs = canonical(model, batches)
    modules = find_modules(model, inputs[0], kinds=BOTH)
    found = collect_statistics(model, inputs, modules, needs=("activation_l2",))
    expected = naive_statistics(model, alone(batches), modules)
    assert expected["his"].keys() == {module.name for module in modules}
    for what in ("his", "fisher", "entropy", "activation_l2"):
        for name, values in expected[what].items():
            assert found[what][name] == pytest.approx(values, rel=1e-3, abs=1e-6), (what, name)


def test_predictions_are_those_at_the_labels_of_each_sample(model: PreTrainedModel) -> None:
    batches = batches_of(model)
    tokens, nll, effects = [], [], []
    for one in alone(batches):
        with torch.no_grad():
            logits = model(**one).logits[0].log_softmax(-1)  # the model makes the decoder's inputs of the labels
        tokens += logits.argmax(-1).tolist()
        nll += [-logits[place, label].item() for place, label in enumerate(one["labels"][0].tolist())]
        effects.append(-sum(nll[-one["labels"].shape[1] :]))
    inputs, task = canonical(model, batches), task_of(model)
    found = predict(model, inputs)
    assert found.values.tolist() == tokens
    assert found.nll.tolist() == pytest.approx(nll, rel=1e-3, abs=1e-4)
    assert not found.whole  # every token is a prediction of its own
    with torch.no_grad():
        outputs = [model(**{key: batch[key] for key in batch if key != "labels"}).logits for batch in inputs]
    effect = torch.cat([task.effect(model, *pair, 0) for pair in zip(inputs, outputs, strict=True)])
    assert effect.tolist() == pytest.approx(effects, rel=1e-3, abs=1e-3)


@pytest.fixture(scope="module")
def result(model: PreTrainedModel) -> PruneResult:
    return prune(
        model, batches_of(model), modules=BOTH, criterion="compensated", compensation=None, budget={"flops": 0.7}
    )


def test_heads_and_neurons_of_both_parts_share_one_budget(model: PreTrainedModel, result: PruneResult) -> None:
    assert result.flops.slim <= 0.7 * result.flops.dense
    assert {kept.kind for kept in result.plan.kept.values() if kept.removed} == {"attention", "mlp"}
    decoder = "decoder." if isinstance(model, T5ForConditionalGeneration) else "model.decoder."
    cut = [name.startswith(decoder) for name, kept in result.plan.kept.items() if kept.removed]
    assert {True, False} == set(cut)
    assert result.held_out is not None
    assert result.held_out.metrics.keys() == {"perplexity", "token_accuracy"}


def test_the_cut_model_is_the_masked_one(model: PreTrainedModel, result: PruneResult) -> None:
    batch = canonical(model, batches_of(model, 6))[5]
    assert compare_cut(model, result.model, result.plan, result.job.modules, batch) < 1e-4


def test_the_saved_model_gives_the_same_and_generates(
    model: PreTrainedModel, result: PruneResult, tmp_path: Path
) -> None:
    result.save_pretrained(tmp_path / "slim")
    loaded: Any = load(tmp_path / "slim")
    inputs = canonical(model, batches_of(model))[0]
    source = {key: inputs[key] for key in ("input_ids", "attention_mask", "input_features") if key in inputs}
    with torch.no_grad():
        assert torch.equal(loaded(**inputs).logits, result.model(**inputs).logits)
    kept = {len(kept.units) for kept in result.plan.kept.values() if kept.kind == "attention"}
    assert len(kept) > 1  # the layers' caches differ in heads
    greedy: Any = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 1, "do_sample": False}
    generated = loaded.generate(**source, **greedy)
    assert torch.equal(generated, result.model.generate(**source, **greedy))
    assert torch.equal(generated, loaded.generate(**source, **greedy, use_cache=False))


def scores_of(result: PruneResult) -> dict[str, list[float]]:
    assert result.scores is not None
    return {name: values.tolist() for name, values in result.scores.scores.items()}


@pytest.mark.parametrize(("make", "criterion"), [(t5, "hies"), (bart, "hies"), (t5, "compensated")])
def test_neither_padding_nor_the_order_of_batches_changes_the_cut(
    make: Callable[[], PreTrainedModel], criterion: str
) -> None:
    torch.manual_seed(1)
    model = make()
    batches = batches_of(model, 8)
    how: Any = {"criterion": criterion, "budget": {"heads": 0.4}, "compensation": {"method": "least_squares"}}
    one, padded, reverse = (
        prune(model, given, held_out=[], **how) for given in (batches, wider(model, batches), batches[::-1])
    )
    for other in (padded, reverse):
        assert other.plan.kept == one.plan.kept
        for name, values in scores_of(one).items():
            assert scores_of(other)[name] == pytest.approx(values, rel=2e-3, abs=2e-5)
    changed = dict(padded.model.named_parameters())
    assert all(torch.allclose(changed[name], value, atol=1e-3) for name, value in one.model.named_parameters())


@pytest.mark.parametrize("make", [t5, bart, whisper])
def test_without_labels_the_models_own_answers_are_the_target(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(2)
    model = make()
    model.generation_config.max_length = 9
    batch = batch_of(model, 0, labels=False)
    # The end of text is a token that the first answer has.
    (free,) = canonical(model, [batch])
    end = int(free["labels"][0, 3])
    model.generation_config.eos_token_id = end
    (found,) = canonical(model, [batch])
    for row in range(4):
        source = {key: value[row : row + 1] for key, value in batch.items()}
        answer = [int(model.config.decoder_start_token_id)]
        while len(answer) < 9 and end not in answer[1:]:
            with torch.no_grad():
                logits = model(**source, decoder_input_ids=torch.tensor([answer])).logits
            answer.append(int(logits[0, -1].argmax()))
        length = len(answer) - 1
        assert found["labels"][row, :length].tolist() == answer[1:]
        assert found["decoder_input_ids"][row, :length].tolist() == answer[:-1]
        assert found["labels"][row, length:].eq(-100).all()
        assert found["decoder_attention_mask"][row].sum() == length
    batches = batches_of(model, labels=False)
    result = prune(model, batches, criterion="his", budget={"heads": 0.3})
    assert result.plan.calibration["labels"] == "predictions"
    assert result.held_out is not None
    assert result.held_out.metrics["token_accuracy"].dense == 1
    assert result.held_out.metrics["token_accuracy"].slim == pytest.approx(result.held_out.stability)


@pytest.mark.parametrize("make", [t5, bart])
def test_batches_of_the_collator_and_tokenised_rows_are_taken(make: Callable[[], PreTrainedModel]) -> None:
    torch.manual_seed(3)
    model = make()
    words = [f"w{number}" for number in range(40)]
    tokens = word_tokenizer(words, pad_token="[PAD]")
    model.config.pad_token_id = tokens.pad_token_id
    texts = [" ".join(words[(3 * row + place) % 40] for place in range(3 + row % 5)) for row in range(16)]
    rows = [{**tokens(text), "labels": tokens(text[::-1]).input_ids} for text in texts]
    for row in rows:
        row.pop("token_type_ids", None)
    found = []
    for of_model in (model, None):  # with the model, the collator makes the decoder's inputs
        collate = DataCollatorForSeq2Seq(tokens, model=of_model)
        given = [dict(collate([dict(row) for row in rows[start : start + 4]])) for start in range(0, 16, 4)]
        assert ("decoder_input_ids" in given[0]) == (of_model is not None)
        found.append(prune(model, given, criterion="his", budget={"heads": 0.4}))
    of_rows = datasets.Dataset.from_list(rows)
    found.append(prune(model, of_rows, processor=tokens, criterion="his", budget={"heads": 0.4}, held_out=[]))
    assert found[0].plan.kept == found[1].plan.kept
    assert scores_of(found[0]) == scores_of(found[1])
    assert found[2].scores is not None


def without(key: str) -> Callable[[Batch], Batch]:
    return lambda batch: {name: value for name, value in batch.items() if name != key}


def labels(change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    return lambda batch: {**batch, "labels": change(batch["labels"])}


def inputs(change: Callable[[Tensor], Tensor]) -> Callable[[Batch], Batch]:
    return lambda batch: {**batch, "decoder_input_ids": change(batch["labels"].clamp(min=0))}


def no_label(given: Tensor) -> Tensor:
    return given.index_fill(0, torch.tensor([2]), -100)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (labels(no_label), "every sample must have a label token, but one of batch 0 .* has none"),
        (lambda batch: without("labels")(inputs(lambda x: x)(batch)), "have labels, .*, beside decoder_input_ids"),
    ],
)
def test_batches_that_name_no_target_are_refused(change: Callable[[Batch], Batch], match: str) -> None:
    model = bart()
    with pytest.raises(DataError, match=match):
        prune(model, [change(batch) for batch in batches_of(model)], criterion="his", budget={"heads": 0.4})


def test_a_model_that_cannot_answer_needs_labels() -> None:
    model = bart()
    batches = [{"input_ids": torch.full((4, 40), 5)} for _ in range(2)]  # more than its positions
    with pytest.raises(RequestError, match="must answer batches without labels, but does not: .*; give labels"):
        prune(model, batches, budget={"heads": 0.4})


def test_a_decoder_that_starts_with_no_token_is_refused() -> None:
    model = t5()
    model.config.decoder_start_token_id = None
    with pytest.raises(RequestError, match="T5.* must make the decoder's inputs of labels, .*; set decoder_start_tok"):
        prune(model, batches_of(model), budget={"heads": 0.4})


def test_what_is_not_batches_is_refused() -> None:
    model = bart()
    with pytest.raises(DataError, match="batches of text2text-generation must be batches .*, got a list of texts"):
        prune(model, ["a text"], budget={"heads": 0.4})
    rows = datasets.Dataset.from_dict({"source": ["a", "b"], "target": ["b", "c"]})
    with pytest.raises(DataError, match="or a data set, with input_ids, attention_mask and labels, got source, target"):
        prune(model, rows, processor=word_tokenizer(["a"]), budget={"heads": 0.4})
    columns = {"text": "source"}
    with pytest.raises(DataError, match="needs batches with input_ids, .* and no columns=; leave it out"):
        prune(model, rows, columns=columns, processor=word_tokenizer(["a"]), budget={"heads": 0.4})


def test_runtimes_and_exports_are_refused(result: PruneResult, model: PreTrainedModel, tmp_path: Path) -> None:
    latency = {"latency": {"ratio": 0.8, "runtime": "onnxruntime-cpu"}}
    with pytest.raises(RequestError, match="is not exported as one graph, .* torch only, got onnxruntime-cpu; set"):
        prune(model, batches_of(model), budget=latency)
    with pytest.raises(UnsupportedModelError, match="is an encoder-decoder: export its encoder"):
        result.export_onnx(tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("task", ["text2text-generation", "automatic-speech-recognition"])
@pytest.mark.parametrize("section", [{}, {"deploy": {"keep": 0.9}, "prune": {}}])
def test_recipes_are_refused_by_name(task: str, section: dict[str, Any]) -> None:
    sections: dict[str, Any] = {"prune": {"budget": {"heads": 0.5}}, **section}
    data = {"name": "some/data", "prompt": "{source}", "answer": "target"}
    with pytest.raises(RecipeError, match=f"{task} is pruned in memory only, from batches: .*; call hies_export.prune"):
        PruningRecipe(model="m", task=task, data=data, **sections)


@pytest.mark.filterwarnings("ignore:Version v4.12.0 introduces:FutureWarning")  # of EncoderDecoderModel's loss
def test_both_parts_lose_units_where_each_has_a_config_of_its_own() -> None:
    sizes: Any = {"vocab_size": 40, "hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 4}
    parts = [BertConfig(**sizes, intermediate_size=32, max_position_embeddings=32) for _ in range(2)]
    config = EncoderDecoderConfig.from_encoder_decoder_configs(*parts)
    config.decoder_start_token_id, config.pad_token_id = 1, 0
    torch.manual_seed(0)
    model = shake(EncoderDecoderModel(config))
    tokens = torch.randint(2, 40, (4, 6))
    batches = [{"input_ids": tokens, "labels": tokens.flip(0)} for _ in range(2)]
    result = prune(model, batches, criterion="his", budget={"heads": 0.5}, allocation="uniform")
    assert [len(kept.units) for kept in result.plan.kept.values()] == [2, 2, 2]  # also those between them


def test_speech_may_have_another_name_than_the_model_gives_its_main_input() -> None:
    model, _ = tiny("speech-encoder-decoder")
    assert model.main_input_name == "inputs"
    labels = torch.randint(2, 20, (3, 6))
    batches = [{"input_values": torch.randn(3, 400), "labels": labels} for _ in range(2)]
    with pytest.raises(RequestError, match="; set decoder_start_token_id and pad_token_id in its config, or give"):
        prune(model, batches, criterion="his", budget={"heads": 0.3})
    model.config.decoder_start_token_id, model.config.pad_token_id = 1, 0
    result = prune(model, batches, criterion="his", budget={"heads": 0.3})
    assert {name.partition(".")[0] for name in result.plan.kept} == {"encoder", "decoder"}


def test_only_encoder_decoders_are_models_of_the_tasks() -> None:
    assert type(task_of(t5())) is TASKS["text2text-generation"]
    assert type(task_of(whisper())) is TASKS["automatic-speech-recognition"]
    # Its labels stand one place later: it is a decoder that hears.
    hears = SimpleNamespace(model_type="qwen2_audio", is_encoder_decoder=False)
    assert task_by_class("Qwen2AudioForConditionalGeneration", hears) is None
    sees = SimpleNamespace(model_type="vision-encoder-decoder", is_encoder_decoder=True)
    assert task_by_class("VisionEncoderDecoderModel", sees) is None
