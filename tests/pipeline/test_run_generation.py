"""The whole line on a language model and on a vision-language model, tiny ones always and real data where it is."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from PIL import Image
from support.loading import load_pruning, recipe_of
from support.models import causal_lm, llava, llava_processor, save_stories, write_recipe
from support.runs import hies
from transformers import AutoTokenizer

import hies_export
from hies_export import Report, RequestError


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A tiny LLaMA with a tokenizer of words, and lines of text."""
    return save_stories(
        tmp_path,
        lines=200,
        calibration={"split": "train[:60%]", "samples": 12, "batch_size": 4},
        evaluation={"split": "train[60%:]"},
        prune={"alpha": 0.5, "budget": {"heads": 0.5}, "allocation": "uniform"},
        measure={"repeats": 2, "shapes": [[2, 16]]},
    )


def test_language_model(stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    causal_lm(num_hidden_layers=1).save_pretrained(tmp_path / "model")  # two graphs are traced
    assert hies("run", stories, "--json") == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["heads"]["total"], summary["heads"]["removed"]) == (4, 2)
    assert summary["quality"]["metric"] == "perplexity"
    assert summary["onnx_max_abs"] < 1e-3
    # One of two key/value heads of width 8 is left: keys and values in float32.
    assert summary["cache_bytes_per_token"] == {"dense": 2 * 2 * 8 * 4, "slim": 2 * 8 * 4}
    assert [(row["runtime"], row["phase"]) for row in summary["latency"]] == [
        (runtime, phase) for runtime in ("torch", "onnxruntime-cpu") for phase in ("prefill", "decode")
    ]
    for row in summary["latency"]:
        assert (row["batch"], row["sequence"]) == (2, 16)
        tokens = row["batch"] * (1 if row["phase"] == "decode" else row["sequence"])
        speed = {side: tokens / row[f"{side}_ms"] * 1000 for side in ("dense", "slim")}
        assert row["tokens_per_second"] == pytest.approx(speed)
        assert (row["realised"] is None) == (row["phase"] == "decode")
    page = (tmp_path / "out" / "report.md").read_text()
    assert "| cache per token | 128 B | 64 B | -50.0% |" in page
    assert "| same next token |" in page
    assert "| onnxruntime-cpu 2 x 16 decode |" in page
    assert "AutoModelForCausalLM" in (tmp_path / "out" / "slim" / "README.md").read_text()

    # The perplexity of the dense model, by hand: every block but its first token.
    model = hies_export.load(tmp_path / "model")
    tokens = AutoTokenizer.from_pretrained(tmp_path / "model")
    lines = (tmp_path / "text.txt").read_text().split("\n")
    text = "\n".join(lines[round(0.6 * 200) :])
    ids = torch.tensor(tokens(text, add_special_tokens=False).input_ids)
    blocks = ids[: len(ids) // 24 * 24].view(-1, 24)
    with torch.no_grad():
        by_hand = model(input_ids=blocks, labels=blocks).loss.exp().item()
    assert summary["quality"]["dense"] == pytest.approx(by_hand, rel=0.1)  # blocks may begin elsewhere by a token


@pytest.mark.usefixtures("untraced")
def test_query_heads_in_half_precision(stories: Path, tmp_path: Path) -> None:
    options = ["prune.unit=query", "prune.allocation=global", "dtype=bfloat16", "measure.runtimes=[torch]"]
    settings = [part for option in options for part in ("--set", option)]
    assert hies("run", stories, *settings) == 0
    report = Report.from_file(tmp_path / "out")
    assert report.heads["removed"] == 4
    assert all(count == 2 for count in report.heads["kept_per_layer"])
    assert report.cache_bytes_per_token == {"dense": 128, "slim": 128}
    assert {row["dtype"] for row in report.latency} == {"bfloat16"}


@pytest.mark.usefixtures("untraced")
def test_the_scale_of_the_logits_is_in_the_last_norm_and_comes_along_with_the_plan(
    stories: Path, tmp_path: Path
) -> None:
    options = ["prune.compensation={method: least_squares, samples: 24}", "measure.runtimes=[torch]"]
    assert hies("run", stories, *(part for option in options for part in ("--set", option))) == 0
    scale = Report.from_file(tmp_path / "out").details.logit_scale
    assert scale != 1
    assert f"the logits multiplied by {scale:.3f}" in (tmp_path / "out" / "report.md").read_text()
    dense, slim = (hies_export.load(folder) for folder in (tmp_path / "model", tmp_path / "out" / "slim"))
    torch.testing.assert_close(slim.model.norm.weight, scale * dense.model.norm.weight)
    assert hies("apply", tmp_path / "out" / "plan.json", tmp_path / "model", "-o", tmp_path / "again") == 0
    again = hies_export.load(tmp_path / "again").state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in slim.state_dict().items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prune__towers": ["vision"]}, "towers must be among language, the towers of this model, got 'vision'"),
        ({"prune__min_heads": 3}, "remove 1 of 2 key/value groups, but min_heads, .* let 0 to 0 go; change"),
    ],
)
def test_what_a_decoder_does_not_have_is_refused(stories: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        load_pruning(recipe_of(stories.parent, **change))


def made_up(folder: Path) -> None:
    """Write a LLaVA, questions about plain colours, and a recipe for both towers."""
    llava().save_pretrained(folder / "model")
    llava_processor().save_pretrained(folder / "model")
    rows = []
    for i in range(40):
        file = io.BytesIO()
        Image.new("RGB", (16, 16), (i * 6, 255 - i * 6, 128)).save(file, "PNG")
        question, answer = "Q " + "abcdefghijkl"[i % 12], "yes" if i % 2 else "no"
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "question": question, "answer": answer})
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    files = {"train": "rows.parquet", "test": "rows.parquet"}
    write_recipe(
        folder,
        "image-text-to-text",
        data={"files": files, "image": "image", "prompt": "{question}\nA", "answer": "answer"},
        calibration={"samples": 12, "batch_size": 6},
        evaluation={"split": "test", "samples": 40},
        prune={"alpha": 0.5, "towers": ["language", "vision"], "budget": {"heads": 0.4}},
        measure={"repeats": 2, "shapes": [[2]]},
    )


@pytest.mark.usefixtures("untraced")  # an example runs a LLaVA with its graphs, and tests/onnx prompts those of one
def test_vision_language_model(tmp_path: Path) -> None:
    made_up(tmp_path)
    assert hies("run", tmp_path / "recipe.yaml") == 0
    out = tmp_path / "out"
    report = Report.from_file(out)
    scores = json.loads((out / "scores.json").read_text())
    assert len(scores["his"]) == 5  # two layers of the decoder, three of the image tower
    assert sum(len(kept) for kept in report.details.head_map.values()) == report.heads["total"] == 20
    assert report.quality["metric"] == "exact_match"
    assert report.cut_max_abs < 1e-4
    assert report.reload_max_abs < 1e-5
    assert {row["runtime"] for row in report.latency} == {"torch"}
    assert any("·" in line for line in report.details.head_map.values())
    images = [tmp_path / f"{i}.png" for i in range(2)]
    for i, file in enumerate(images):
        Image.new("RGB", (64, 64), (200 * i, 60, 90)).save(file)
    texts = hies_export.generate_text(out / "slim", ["Q a\nA", "Q b c d\nA"], images=images, max_new_tokens=12)
    assert len(texts) == 2
    chosen = load_pruning(recipe_of(tmp_path, prune__towers=["vision"])).scored
    assert ["vision_tower" in module.name for module in chosen] == [True] * 3
