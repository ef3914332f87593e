"""Choices judged by their log-likelihood, against a loop over one choice at a time."""

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import PIL.Image
import pytest
import torch
from support.generative import png
from support.models import causal_lm, generative_tokenizer, llava, llava_processor, write_recipe
from support.reading import reading
from support.references import choice_likelihoods

from hies_export import DataError, PruningRecipe, RecipeError, prune
from hies_export.data.batches import by_length, samples_of
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.recipe.sections import Columns
from hies_export.tasks import TextGeneration
from hies_export.tasks.given import unlabelled

LETTERS = "abcdefghijkl"
ROWS = [
    {
        "question": " ".join(LETTERS[(i * 5 + j) % 12] for j in range(1 + i % 4)),
        "choices": [" ".join(LETTERS[(i + 3 * c + j) % 12] for j in range(1 + (i + c) % 3)) for c in range(2 + i % 3)],
        "label": i % 2,
    }
    for i in range(17)
]
ASKED = Columns(prompt="Q {question} A", answer="choices", label="label")
BOTH = ("choice_accuracy", "choice_accuracy_norm")


def columns_of(rows: list[dict[str, Any]]) -> datasets.Dataset:
    return datasets.Dataset.from_dict({key: [row[key] for row in rows] for key in rows[0]})


TASK = TextGeneration(None)


def text_reader(**options: Any) -> Any:
    processor = options.pop("processor", None) or generative_tokenizer()
    return reading("text-generation", columns=ASKED, config=causal_lm().config, processor=processor, **options)


def batches_of(reader: Any, rows: list[dict[str, Any]], size: int) -> list[Any]:
    data = columns_of(rows)
    reader.check_rows(data)
    return by_length(reader.read(reader.draw(data), size=size, use="judge"), config=reader.config)


def decoder(seed: int = 0) -> Any:
    """A random decoder whose predictions are far from uniform: else the shortest choice is always the likeliest."""
    torch.manual_seed(seed)
    model = causal_lm()
    with torch.no_grad():
        model.lm_head.weight *= 8
    return model


def naive(model: Any, rows: list[dict[str, Any]]) -> list[list[float]]:
    return [choice_likelihoods(model, f"Q {row['question']} A", row["choices"]) for row in rows]


@pytest.mark.parametrize("size", [1, 5, 64])
def test_likelihoods_are_those_of_one_choice_at_a_time(size: int) -> None:
    model, labels = decoder(), [row["label"] for row in ROWS]
    batches = batches_of(text_reader(), ROWS, size)
    assert max(len(batch["input_ids"]) for batch in batches) <= size
    assert samples_of(batches) == len(ROWS)
    assert TASK.references(batches).tolist() == labels
    found, expected = predict(model, batches), naive(model, ROWS)
    for row, of_row in enumerate(expected):
        assert found.values[row, : len(of_row)].tolist() == pytest.approx(of_row, abs=1e-4)
        assert (found.values[row, len(of_row) :] == -torch.inf).all()
    per_character = [np.divide(of, [*map(len, row["choices"])]) for of, row in zip(expected, ROWS, strict=True)]
    chosen = [[np.argmax(of) for of in scores] for scores in (expected, per_character)]
    wanted = [np.mean(np.equal(choices, labels)) for choices in chosen]
    quality = Judge(batches, found, BOTH, TASK).of(found)
    assert [quality.metrics[name] for name in BOTH] == pytest.approx(wanted)
    assert 0 < wanted[0] != wanted[1] < 1
    assert quality.stability == 1.0


def test_another_model_agrees_where_it_makes_the_same_choice() -> None:
    models = decoder(), decoder(5)
    batches = batches_of(text_reader(), ROWS, 4)
    one, two = (np.array([np.argmax(of_row) for of_row in naive(model, ROWS)]) for model in models)
    assert TASK.same(*(predict(model, batches) for model in models)).tolist() == (one == two).tolist()
    assert 0 < (one == two).mean() < 1


def test_of_equal_choices_the_first_is_chosen() -> None:
    rows = [{"question": "a", "choices": ["b", "b", "b"], "label": 1}, {"question": "c", "choices": ["d"], "label": 0}]
    found = predict(causal_lm(), batches_of(text_reader(), rows, 8))
    table, _ = TASK.table(found, torch.tensor([1, 0]))
    assert TASK.decide(found).tolist() == table["per_character"].tolist() == [0, 0]


def test_scoring_still_reads_the_right_choice_to_the_end_of_the_text() -> None:
    rows = [{"question": "a b", "choices": ["c", "d e"], "label": 1}]
    reader = text_reader()
    (every,), (right,) = batches_of(reader, rows, 8), reader.read(reader.draw(columns_of(rows)), size=8)
    word = generative_tokenizer().convert_ids_to_tokens
    assert [word(i) for i in right["labels"][0].tolist() if i >= 0] == ["d", "e", "</s>"]
    assert [[word(i) for i in row.tolist() if i >= 0] for row in every["labels"]] == [["c"], ["d", "e"]]
    assert "choice" not in right
    (refit,) = unlabelled([right], reader)
    assert torch.equal(refit["labels"], right["labels"])


def test_prompts_ask_one_question() -> None:
    rows = [{"question": ["a", "b"], "choices": ["c", "d"], "label": 0}]
    with pytest.raises(DataError, match="one question in a row, but 'question' holds lists"):
        batches_of(text_reader(), rows, 8)


def test_choices_about_images_are_those_of_one_at_a_time() -> None:
    model = llava()
    processor = llava_processor()
    rows = [{**row, "image": png(seed)} for seed, row in enumerate(ROWS[:5])]
    columns = Columns(image="image", prompt="Q {question} A", answer="choices", label="label")
    fields: dict[str, Any] = {"columns": columns, "config": model.config, "processor": processor}
    batches = batches_of(reading("image-text-to-text", **fields), rows, 4)
    found = predict(model, batches)
    for number, row in enumerate(rows):
        image = PIL.Image.open(io.BytesIO(row["image"]))
        for choice, text in enumerate(row["choices"]):
            inputs = processor(images=image, text=f"<image>\nQ {row['question']} A {text}", return_tensors="pt")
            count, ids = len(text.split()), inputs["input_ids"][0]
            with torch.no_grad():
                logs = model(**inputs).logits[0].log_softmax(-1)
            expected = sum(logs[t - 1, ids[t]].item() for t in range(len(ids) - count, len(ids)))
            assert found.values[number, choice].item() == pytest.approx(expected, abs=1e-4)


def test_choices_are_judged_by_their_own_metrics(tmp_path: Path) -> None:
    causal_lm().save_pretrained(tmp_path / "model")
    generative_tokenizer().save_pretrained(tmp_path / "model")
    columns_of(ROWS).to_json(tmp_path / "rows.jsonl")
    files = {"train": "rows.jsonl", "validation": "rows.jsonl"}

    def prepared(**evaluation: Any) -> Any:
        recipe = write_recipe(
            tmp_path,
            "text-generation",
            data={"files": files, "prompt": "Q {question} A", "answer": "choices", "label": "label"},
            calibration={"samples": 4},
            evaluation=evaluation,
            prune={"alpha": "auto", "budget": {"heads": 0.5}},
            measure={"runtimes": ["torch"], "shapes": [[1, 8]]},
        )
        return load_recipe(PruningRecipe.from_yaml(recipe))

    found, delivery = prepared(samples=10, batch_size=3)
    rows = found.rows
    assert found.metrics == TASK.usual_metrics(answers=True, choices=True) == BOTH
    assert (samples_of(rows.evaluation), delivery.evaluation_of, samples_of(rows.held_out)) == (10, 17, 13)
    assert all("choice" in batch for batch in (*rows.held_out, *rows.evaluation))
    assert not any("choice" in batch for batch in rows.score)
    with pytest.raises(RecipeError, match=r"choices among answers \(data.label\) must be among choice_.*'perplexity'"):
        prepared(metrics=["perplexity", "choice_accuracy"])


def test_choices_are_judged_in_memory_too() -> None:
    columns = {"prompt": "Q {question} A", "answer": "choices", "label": "label"}
    how: dict[str, Any] = {"columns": columns, "processor": generative_tokenizer(), "budget": {"heads": 0.5}}
    result = prune(decoder(), columns_of(ROWS), held_out=columns_of(ROWS), **how)
    assert result.held_out is not None
    assert list(result.held_out.metrics) == [*BOTH]
    chosen = [np.array([np.argmax(of_row) for of_row in naive(model, ROWS)]) for model in (decoder(), result.model)]
    assert result.held_out.stability == pytest.approx((chosen[0] == chosen[1]).mean())
    dense_is_right = (chosen[0] == [row["label"] for row in ROWS]).mean()
    assert result.held_out.metrics["choice_accuracy"].dense == pytest.approx(dense_is_right)
