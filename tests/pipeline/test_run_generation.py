"""The whole line on a language model and on a vision-language model, tiny ones always and real data where it is."""

import io
import json
from collections.abc import Callable
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path

import datasets
import pytest
import torch
from PIL import Image
from support.models import (
    GENERATIVE_WORDS,
    causal_lm,
    generative_tokenizer,
    llava,
    llava_processor,
    save_stories,
    write_recipe,
)
from support.runs import hies, without_tracing
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

import hies_export
from hies_export.report.report import Report

GREEDY_TOKENS = 64


@pytest.fixture
def stories(tmp_path: Path) -> Path:
    """A tiny LLaMA with a tokenizer of words, and lines of text."""
    return save_stories(
        tmp_path,
        lines=200,
        calibration={"split": "train[:60%]", "samples": 12, "batch_size": 4},
        evaluation={"split": "train[60%:]"},
        prune={"alpha": 0.5, "budget": {"heads": 0.5}, "allocation": "uniform"},
        measure={"repeats": 2, "shapes": [[1, 8], [2, 16]]},
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
    assert {(row["runtime"], row["batch"], row["sequence"]) for row in summary["latency"]} == {
        (runtime, *shape) for runtime in ("torch", "onnxruntime-cpu") for shape in ((1, 8), (2, 16))
    }
    assert [row["phase"] for row in summary["latency"]] == ["prefill", "decode"] * 4
    for row in summary["latency"]:
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


@pytest.mark.parametrize(
    "options",
    [
        ["prune.alpha=auto", "prune.compensation.method=least_squares", "prune.compensation.samples=24"],
        ["prune.criterion=compensated", "prune.compensation.method=least_squares"],
        ["prune.unit=query", "prune.allocation=global", "dtype=bfloat16", "measure.dtypes=[float16, bfloat16]"],
        ["data.packing=false", "evaluation.metrics=[token_accuracy, perplexity]"],
    ],
    ids=["alpha auto", "compensated", "query heads", "rows"],
)
@pytest.mark.usefixtures("untraced")
def test_other_ways(options: list[str], stories: Path, tmp_path: Path) -> None:
    settings = [part for option in [*options, "measure.runtimes=[torch]"] for part in ("--set", option)]
    assert hies("run", stories, *settings) == 0
    report = Report.from_file(tmp_path / "out")
    assert report.heads["removed"] == 4
    if "prune.unit=query" in options:
        assert all(count == 2 for count in report.heads["kept_per_layer"])
        assert report.cache_bytes_per_token == {"dense": 128, "slim": 128}
        assert list(dict.fromkeys(row["dtype"] for row in report.latency)) == ["float16", "bfloat16"]


COLUMNS = "text-generation needs data.text (one column), data.messages, or data.prompt and data.answer"
BAD = {
    "label": ("data.label=text", COLUMNS),
    "answer alone": ("data.answer=text", COLUMNS),
    "metric": ("evaluation.metrics=[accuracy]", "the metrics of a language model must be among perplexity, token_acc"),
    "tower": ("prune.towers=[vision]", "prune.towers must be among language, the towers of this model, got 'vision'"),
    "slice": ("calibration.split=train[5]", "a slice of a split must be like train[:80%]"),
    "device map": ("device_map=auto", "device_map needs accelerate, which is not installed"),
    "groups": ("prune.min_heads=3", "remove 1 of 2 key/value groups, but min_heads 3 leave only 0 to remove"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_sentence_and_leaves_nothing(
    name: str, stories: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    option, message = BAD[name]
    if name == "device map":
        monkeypatch.setattr(
            "hies_export.errors.find_spec", lambda name: None if name == "accelerate" else find_spec(name)
        )
    before = sorted(p.name for p in tmp_path.iterdir())
    assert hies("run", stories, "--set", option) == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def save_questions(folder: Path, files: dict[str, str], *, prompt: str, samples: int, evaluated: int) -> None:
    """Write a recipe for both towers of a LLaVA in `model`."""
    write_recipe(
        folder,
        "image-text-to-text",
        data={"files": files, "image": "image", "prompt": prompt, "answer": "answers"},
        calibration={"samples": samples, "batch_size": samples // 2},
        evaluation={"split": "test", "samples": evaluated},
        prune={"alpha": 0.5, "towers": ["language", "vision"], "budget": {"heads": 0.4}},
        measure={"repeats": 2, "shapes": [[1], [2]]},
    )


def easy_vqa(shared: Path, folder: Path) -> None:
    """A LLaVA for 64-pixel images in patches of 16, with the words of the data."""
    files = {split: str(shared / "data" / "easy_vqa" / f"{split}.parquet") for split in ("train", "test")}
    rows = datasets.load_dataset("parquet", data_files=files, cache_dir=str(folder / "cache"))["train"]
    texts = [t for row in rows.select_columns(["questions", "answers"]) for t in (*row["questions"], *row["answers"])]
    special = GENERATIVE_WORDS[:6]
    words = {word for text in [*texts, "Question: Answer:"] for word in text.replace("?", " ?").split()}
    tokenizer = generative_tokenizer([*special, *sorted(words - {*special})])
    model = llava(vocab_size=len(tokenizer))
    model.config.vision_config.update({"image_size": 64, "patch_size": 16})
    type(model)(model.config).save_pretrained(folder / "model")
    llava_processor(tokenizer, image_size=64, patch_size=16).save_pretrained(folder / "model")
    save_questions(folder, files, prompt="Question: {questions}\nAnswer:", samples=16, evaluated=48)


def made_up(folder: Path) -> None:
    """The same of plain colours."""
    llava().save_pretrained(folder / "model")
    llava_processor().save_pretrained(folder / "model")
    rows = []
    for i in range(40):
        file = io.BytesIO()
        Image.new("RGB", (16, 16), (i * 6, 255 - i * 6, 128)).save(file, "PNG")
        question, answer = ["Q " + "abcdefghijkl"[i % 12]], ["yes" if i % 2 else "no"]
        rows.append({"image": {"bytes": file.getvalue(), "path": None}, "questions": question, "answers": answer})
    datasets.Dataset.from_list(rows).to_parquet(folder / "rows.parquet")
    save_questions(
        folder, {"train": "rows.parquet", "test": "rows.parquet"}, prompt="{questions}\nA", samples=12, evaluated=40
    )


@pytest.mark.usefixtures("untraced")  # an example runs a LLaVA with its graphs, and tests/onnx prompts those of one
@pytest.mark.parametrize("make", [made_up, easy_vqa], ids=["made up", "easy_vqa"])
def test_vision_language_model(make: Callable[..., None], tmp_path: Path, request: pytest.FixtureRequest) -> None:
    if make is easy_vqa:
        make(request.getfixturevalue("shared"), tmp_path)
    else:
        make(tmp_path)
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
    cut = {name.split(".")[1]: line for name, line in report.details.head_map.items() if "·" in line}
    assert cut
    images = [tmp_path / f"{i}.png" for i in range(2)]
    for i, file in enumerate(images):
        Image.new("RGB", (64, 64), (200 * i, 60, 90)).save(file)
    prompts = ["Q a\nA", "Q b c d\nA"] if make is made_up else ["what shape is this?", "is there a red shape?"]
    texts = hies_export.generate_text(out / "slim", prompts, images=images, max_new_tokens=12)
    assert len(texts) == 2


def test_towers_are_chosen(tmp_path: Path) -> None:
    made_up(tmp_path)
    for towers, names in ((["language"], {"language_model"}), (["vision"], {"vision_tower"})):
        out = tmp_path / towers[0]
        assert hies("score", tmp_path / "recipe.yaml", "--set", f"prune.towers={towers}", "-o", out) == 0
        plan = json.loads((out / "plan.json").read_text())
        assert len(plan["kept"]) == 5
        cut = {n for n, kept in plan["kept"].items() if len(kept["units"]) < kept["total"]}
        assert {part for n in cut for part in n.split(".") if part in ("language_model", "vision_tower")} == names


# ---- a real language model ---------------------------------------------------------------------------------


def greedy(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model.generate(**batch, max_new_tokens=GREEDY_TOKENS, min_new_tokens=GREEDY_TOKENS, do_sample=False)


@pytest.mark.slow
@pytest.mark.parametrize(("allocation", "share"), [("global", 0.25), ("uniform", 0.5)])
def test_stories_without_some_of_their_groups(allocation: str, share: float, shared: Path, tmp_path: Path) -> None:
    # Stock LLaMA configs refuse 6 heads, which do not divide the width of 64; 4 do.
    settings = {"prune.budget.heads": share, "prune.allocation": allocation}
    settings |= {"measure.repeats": 2, "measure.runtimes": "[torch]", "measure.shapes": "[[1, 16]]"}
    settings |= {"calibration.samples": 32, "prune.compensation.samples": 96, "evaluation.samples": 80}
    options = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    recipe = Path(__file__).parents[2] / "recipes" / "stories-llama.yaml"
    # In ONNX only the uneven one: a graph takes as long as all the rest.
    with nullcontext() if allocation == "global" else without_tracing():
        assert hies("run", recipe, *options, "-o", tmp_path / "out") == 0
    report = Report.from_file(tmp_path / "out")
    assert (report.heads["total"], report.heads["removed"]) == (40, 40 * share)
    assert report.quality["metric"] == "perplexity"
    assert report.quality["dense"] == pytest.approx(6.6, abs=0.3)
    assert report.quality["dense"] < report.quality["slim"] < 12
    assert report.cache_bytes_per_token == {"dense": 1280, "slim": 1280 * (1 - share)}
    slim = tmp_path / "out" / "slim"
    assert (slim / "modeling_hies.py").exists() == (allocation == "global")

    tokenizer = AutoTokenizer.from_pretrained(slim, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    prompts = ["Once upon a time", "Tom and Lily went to the park. They", "One day"]
    batch = dict(tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False))
    assert (batch["attention_mask"] == 0).any()
    in_torch = greedy(hies_export.load(slim), batch)
    assert in_torch.shape[1] == batch["input_ids"].shape[1] + GREEDY_TOKENS
    if allocation == "global":
        generator = hies_export.OnnxGenerator.from_folder(tmp_path / "out" / "onnx")
        in_onnx = generator.generate(**batch, max_new_tokens=GREEDY_TOKENS, eos_token_id=-1)
        assert torch.equal(in_onnx, in_torch)
    text = tokenizer.batch_decode(in_torch, skip_special_tokens=True)
    assert all(len(set(t.split())) > 15 for t in text)  # words, not one word again and again

    if allocation == "uniform":
        # The stock class, which no code of this package travels with; the longest prompt has no padding.
        stock = AutoModelForCausalLM.from_pretrained(slim, dtype=torch.float32)
        assert type(stock).__module__.startswith("transformers.models.")
        assert torch.equal(greedy(stock, {"input_ids": batch["input_ids"][1:2]})[0], in_torch[1])
