"""Runs that remove tokens, judged again by the whole model and the whole tokenizer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from support.loading import load_pruning
from support.models import write_recipe
from support.runs import without_tracing
from support.vocabularies import byte_level, pages, reader, unigram, wordpiece
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

import hies_export
from hies_export import PruningPlan, PruningRecipe, Report, count_flops, count_parameters
from hies_export.errors import HiesError, PlanError, RequestError
from hies_export.forms.deployment import DeployWay
from hies_export.forms.latency import TimedCut, TimedOn
from hies_export.pipeline import fastest
from hies_export.pipeline.pruning import Pruning
from hies_export.recipe.budget import Found

# Every fourth sentence is one to score on, so that the others have tokens that go.
TRAIN, OTHER = pages()[::4], pages()[1::8]


def project(folder: Path, **sections: Any) -> Path:
    """Write a classifier of sentences, its rows and a recipe."""
    tokenizer = wordpiece()
    torch.manual_seed(0)
    model = reader("BertForSequenceClassification", tokenizer, num_labels=3, max_position_embeddings=96)
    with torch.no_grad():  # so that classes differ
        model.classifier.weight.mul_(20)
    model.save_pretrained(folder / "model")
    tokenizer.model_max_length = 96
    tokenizer.save_pretrained(folder / "model")
    for name, texts in (("train", TRAIN), ("validation", OTHER)):
        rows = (json.dumps({"text": text, "label": number % 3}) for number, text in enumerate(texts))
        (folder / f"{name}.jsonl").write_text("\n".join(rows))
    usual = {
        "data": {"files": {"train": "train.jsonl", "validation": "validation.jsonl"}, "text": "text", "label": "label"},
        "calibration": {"samples": 16, "batch_size": 8},
        "vocabulary": {},
        "prune": {"budget": {"parameters": 0.75}},
        "measure": {"runtimes": ["torch"], "shapes": [[2, 16]], "repeats": 2},
    }
    return write_recipe(folder, "text-classification", **(usual | sections))


def run(recipe: Path, **overrides: Any) -> Report:
    with without_tracing():
        return hies_export.run(PruningRecipe.from_yaml(recipe, overrides))


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Report]:
    folder = tmp_path_factory.mktemp("trimmed")
    return folder, run(project(folder))


def classes(model: Any, tokenizer: Any, texts: tuple[str, ...]) -> torch.Tensor:
    with torch.no_grad():
        found = [model(**tokenizer(t, return_tensors="pt", truncation=True)).logits.argmax(-1) for t in texts]
    return torch.cat(found)


def test_what_is_saved_is_what_was_judged_and_the_dense_model_is_the_one_with_all_tokens(
    ran: tuple[Path, Report],
) -> None:
    folder, report = ran
    whole, slim = folder / "model", folder / "out" / "slim"
    dense = AutoModelForSequenceClassification.from_pretrained(whole)
    small = AutoModelForSequenceClassification.from_pretrained(slim, trust_remote_code=True)
    tokenizers = [AutoTokenizer.from_pretrained(place) for place in (whole, slim)]
    before, after = (classes(m, t, OTHER) for m, t in zip((dense, small), tokenizers, strict=True))
    labels = torch.arange(len(OTHER)) % 3
    assert report.stability == pytest.approx((before == after).double().mean().item())
    assert report.quality.dense == pytest.approx((before == labels).double().mean().item())
    assert report.quality.slim == pytest.approx((after == labels).double().mean().item())
    assert (report.parameters.dense, report.parameters.slim) == (count_parameters(dense), count_parameters(small))
    assert report.parameters.ratio <= 0.75
    assert report.bytes.dense > report.bytes.slim
    # Heads and neurons make up for what the tokens alone did not save, and no more.
    assert report.details.outcome.predicted == pytest.approx(report.parameters.ratio)


def test_the_report_says_how_other_texts_are_cut(ran: tuple[Path, Report]) -> None:
    folder, report = ran
    facts = report.vocabulary
    one, other = (AutoTokenizer.from_pretrained(folder / place) for place in ("model", "out/slim"))
    cut = [[tokenizer(text, truncation=True).tokens() for tokenizer in (one, other)] for text in OTHER]
    assert (facts.total, facts.kept, facts.texts) == (len(one) + 7, len(other), len(TRAIN))
    assert facts.judged.otherwise == sum(before != after for before, after in cut) > 0
    assert facts.judged.slim_tokens - facts.judged.dense_tokens == sum(len(a) - len(b) for b, a in cut)
    written = json.loads((folder / "out" / "report.json").read_text())
    assert written["vocabulary"]["kept"] == facts.kept
    assert Report.from_file(folder / "out").vocabulary == facts
    said = f"The vocabulary has the {facts.kept:,} of {facts.total:,} tokens"
    for name in ("report.md", "report.html", "slim/README.md"):
        assert said in (folder / "out" / name).read_text().replace("\xa0", " ")


def test_the_plan_makes_the_same_folder_again(ran: tuple[Path, Report], tmp_path: Path) -> None:
    folder, _ = ran
    out = folder / "out"
    plan = PruningPlan.from_file(out / "plan.json")
    assert PruningPlan.from_json(plan.to_json()) == plan
    hies_export.apply_plan(plan, folder / "model", tmp_path / "again", refit=out / "refit.safetensors")
    for name in ("model.safetensors", "tokenizer.json", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (out / "slim" / name).read_bytes()


def test_a_deployment_says_that_the_tokens_that_went_break_its_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    low = DeployWay("onnxruntime-cpu", "float32", kept=0.95, at_least=0.9, dense_ratio=1.0)
    monkeypatch.setattr(fastest, "try_dense", lambda *_: [low])
    recipe = project(tmp_path, prune={}, deploy={"keep": 0.95, "runtimes": ["onnxruntime-cpu"]})
    with pytest.raises(PlanError, match="without the tokens that go keeps at least 90.00 % .* vocabulary.files more"):
        run(recipe)


def test_a_budget_that_the_tokens_keep_alone_is_refused(tmp_path: Path) -> None:
    recipe = project(tmp_path, prune={"budget": {"parameters": 0.99}})
    with pytest.raises(RequestError, match=r"parameters at most 0.99 of dense, and the tokens that went leave 0\.\d+"):
        run(recipe)


def test_a_budget_of_time_is_held_against_the_model_without_the_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts = [TimedCut(kept, 0.8, 0.8, 0.8, "attention") for kept in (0.5, 0.2)]
    monkeypatch.setattr("hies_export.forms.latency._time_cuts", lambda *_, **__: cuts)
    compared = []

    def timed(where: TimedOn, forms: Any, *_: Any) -> Any:
        compared.append([(form.source.config.vocab_size, form.runtime, form.bits) for form in forms])
        return [None, SimpleNamespace(ratio=0.83, noisy=False)]

    monkeypatch.setattr(TimedOn, "time", timed)
    latency = {"ratio": 0.85, "runtime": "torch", "batch": 2, "sequence": 16, "dtype": "float32"}
    sections = {"modules": ["attention"], "criterion": "his", "compensation": None}
    report = run(project(tmp_path, prune={"budget": {"latency": latency}, **sections}))
    assert report.details.outcome.found == Found(0.83)
    assert compared == [[(report.vocabulary.kept, "torch", "float32")] * 2]


def test_texts_may_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("\n".join(pages()[::50]))
    recipe = project(tmp_path, vocabulary={"files": ["mine.txt"]}, prune={"budget": {"heads": 0.3}})
    facts = load_pruning(PruningRecipe.from_yaml(recipe)).trimming.facts
    assert (facts.source, facts.texts) == ("mine.txt", len(pages()[::50]))


def test_only_tokens_that_went_change_what_a_language_model_says(tmp_path: Path) -> None:
    """Where all tokens stay, the loss is the dense model's over the rows of its head that stay."""
    tokenizer = byte_level()
    for part in (reader("LlamaForCausalLM", tokenizer, max_position_embeddings=64), tokenizer):
        part.save_pretrained(tmp_path / "model")
    dense = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    (tmp_path / "train.txt").write_text("\n".join(TRAIN))
    recipe = write_recipe(
        tmp_path,
        "text-generation",
        data={"files": {"train": "train.txt", "validation": "train.txt"}, "text": "text"},
        calibration={"samples": 8},
        evaluation={"split": "validation[:20]"},
        vocabulary={},
        prune={},
        measure={"runtimes": [], "shapes": [[1, 16]]},
    )
    report, small = run(recipe), hies_export.load(tmp_path / "out" / "slim")
    assert json.loads((tmp_path / "out" / "scores.json").read_text())["scores"] == {}  # no unit goes
    assert "scored" not in (tmp_path / "out" / "report.md").read_text()
    smaller = AutoTokenizer.from_pretrained(tmp_path / "out" / "slim")
    batch = {"input_ids": torch.zeros(1, 16, dtype=torch.int64)}
    assert (report.flops.dense, report.flops.slim) == (count_flops(dense, batch), count_flops(small, batch))
    assert small.config.eos_token_id == smaller.eos_token_id
    assert (report.quality.metric, report.vocabulary.judged.otherwise) == ("nats_per_character", 0)
    stay = [tokenizer.convert_tokens_to_ids(token) for token in smaller.vocab]
    nats, characters, same = [0.0, 0.0], 0, []
    read = torch.tensor(tokenizer("".join(f"{text}\n" for text in TRAIN[:20]), verbose=False)["input_ids"])
    for ids in read[: len(read) // 64 * 64].view(-1, 1, 64):
        with torch.no_grad():
            logits = dense(ids).logits[:, :-1]
        only = torch.full_like(logits, -torch.inf)
        only[..., stay] = logits[..., stay]
        for number, of in enumerate((logits, only)):
            nats[number] -= of.log_softmax(-1).gather(-1, ids[:, 1:, None]).sum().item()
        same.append((logits.argmax(-1) == only.argmax(-1)).flatten())
        characters += len(tokenizer.decode(ids[0, 1:]))
    assert report.quality.dense == pytest.approx(nats[0] / characters, rel=1e-4)
    assert report.quality.slim == pytest.approx(nats[1] / characters, rel=1e-4)
    assert report.stability == pytest.approx(torch.cat(same).double().mean().item())


SHORT, ANSWERS = ([text for text in texts if len(text) < 120][:40] for texts in (TRAIN, OTHER))
WORDS = [text.split() for text in SHORT]
# What is read -> a task, a class, what trains its tokenizer, rows, columns to read, and what is read of them, by hand.
READ: dict[str, tuple[str, str, Any, dict[str, Any], dict[str, Any], Any]] = {
    "prompts with answers": (
        "text-generation",
        "LlamaForCausalLM",
        byte_level,
        {"a": SHORT, "b": ANSWERS},
        {"prompt": "Page: {a}\nNext?", "answer": "b"},
        lambda read: [read(f"Page: {a}\nNext? {b}") for a, b in zip(SHORT, ANSWERS, strict=True)],
    ),
    "choices": (
        "text-generation",
        "LlamaForCausalLM",
        byte_level,
        {"a": SHORT, "b": [[b, b[::-1]] for b in ANSWERS], "right": [0] * 40},
        {"prompt": "Page:\n{a}\n", "answer": "b", "label": "right"},
        lambda read: [read(f"Page:\n{a}\n{b[::-1]}") for a, b in zip(SHORT, ANSWERS, strict=True)],
    ),
    "blocks of text": (
        "text-generation",
        "LlamaForCausalLM",
        byte_level,
        {"a": [*SHORT, ""]},
        {"text": "a"},
        lambda read: [read("\n".join([*SHORT, "", ""]))],
    ),
    "masks": (
        "fill-mask",
        "XLMRobertaForMaskedLM",
        unigram,
        {"a": SHORT},
        {"text": "a"},
        lambda read: [read(SHORT[7])],
    ),
    "masks, without tokens that begin or end a text": (
        "fill-mask",
        "BertForMaskedLM",
        wordpiece,
        {"a": SHORT},
        {"text": "a"},
        lambda read: [read(SHORT[7])],
    ),
    "pairs": (
        "text-classification",
        "BertForSequenceClassification",
        wordpiece,
        {"a": SHORT, "b": ANSWERS},
        {"text": ("a", "b")},
        lambda read: [read(a, b) for a, b in zip(SHORT, ANSWERS, strict=True)],
    ),
    "words": (
        "token-classification",
        "XLMRobertaForTokenClassification",
        unigram,
        {"a": WORDS},
        {"text": "a"},
        lambda read: [read(words, is_split_into_words=True) for words in WORDS],
    ),
    "questions": (
        "question-answering",
        "BertForQuestionAnswering",
        wordpiece,
        {"a": SHORT, "b": ANSWERS},
        {"text": ("a", "b")},
        lambda read: [read(a, b) for a, b in zip(SHORT, ANSWERS, strict=True)],
    ),
}


def trimmed(folder: Path, kind: str, rows: dict[str, Any], **vocabulary: Any) -> tuple[Any, Pruning]:
    """Return the tokenizer of a model that reads rows as in `READ`, and what a recipe makes of both."""
    task, name, tokenizer, _, columns, _ = READ[kind]
    reader(name, tokenizer(), max_position_embeddings=400).save_pretrained(folder / "model")
    tokenizer().save_pretrained(folder / "model")
    Dataset.from_dict(rows).to_json(folder / "rows.jsonl")
    files = dict.fromkeys(("train", "validation"), "rows.jsonl")
    recipe = write_recipe(folder, task, data={"files": files, **columns}, vocabulary=vocabulary, prune={})
    return tokenizer(), load_pruning(PruningRecipe.from_yaml(recipe))


@pytest.mark.parametrize("kind", READ)
def test_what_a_task_reads_stays(kind: str, tmp_path: Path) -> None:
    *_, rows, _, by_hand = READ[kind]
    tokenizer, found = trimmed(tmp_path, kind, rows)
    facts, numbers = found.trimming.facts, found.trimming.kept.numbers  # type: ignore[union-attr]
    assert facts.kept < facts.total
    assert facts.judged.otherwise == 0
    before, after = ([one["input_ids"] for one in by_hand(of)] for of in (tokenizer, found.processor))
    assert after == [[numbers[token] for token in ids] for ids in before]


def test_texts_of_files_count_where_a_task_reads_them(tmp_path: Path) -> None:
    Dataset.from_dict({"mine": SHORT}).to_json(tmp_path / "mine.jsonl")
    rows = {"a": ANSWERS[:8], "b": ANSWERS[8:16]}
    tokenizer, found = trimmed(tmp_path, "prompts with answers", rows, files=["mine.jsonl"])
    for text in SHORT:
        read = f"Page: {text}\nNext? {text}"
        assert found.processor.tokenize(read) == tokenizer.tokenize(read)


def test_in_memory_a_trimmed_model_is_pruned(tmp_path: Path) -> None:
    project(tmp_path)
    dense = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    trimmed = hies_export.trim_vocabulary(dense, tokenizer, TRAIN)
    rows = Dataset.from_dict({"text": list(TRAIN[:64])})
    result = hies_export.prune(trimmed.model, rows, processor=trimmed.processor, budget={"parameters": 0.9})
    result.save_pretrained(tmp_path / "slim")
    smaller = AutoTokenizer.from_pretrained(tmp_path / "slim")
    assert len(smaller) == len(trimmed.kept.rows) < len(tokenizer)
    assert torch.equal(
        classes(hies_export.load(tmp_path / "slim"), smaller, OTHER), classes(result.model, trimmed.processor, OTHER)
    )


def test_a_plan_that_removes_tokens_is_refused_in_memory(tmp_path: Path) -> None:
    project(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "model")
    plan = PruningPlan(kept={}, criterion="his", vocabulary=(0, 1))
    with pytest.raises(RequestError, match="plan= cuts heads and neurons, and tokens are to go too; use apply_plan"):
        hies_export.prune(model, Dataset.from_dict({"text": list(TRAIN)}), plan=plan)


@pytest.mark.parametrize(
    ("vocabulary", "problem"),
    [
        ({"files": ["missing.txt"]}, "a data file must be there, but there is no .*missing.txt"),
        ({"files": ["numbers.csv"]}, "vocabulary.files must have a column of text, but .*numbers.csv has none"),
    ],
)
def test_bad_texts_are_refused_before_the_model_is_loaded(
    vocabulary: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    recipe = project(tmp_path, vocabulary=vocabulary)
    (tmp_path / "numbers.csv").write_text("number\n1\n")
    (tmp_path / "model" / "model.safetensors").unlink()
    with pytest.raises(HiesError, match=problem):
        run(recipe)
