"""Models that tag words: entities, their F1, what is kept of them, and the whole line on a tiny model."""

import random
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
import torch
from support.loading import load_pruning
from support.neurons import one_by_one
from support.reading import reading
from support.references import naive_statistics
from support.runs import hies, without_tracing
from support.tags import TAGS, save_tagger, sentences, tag_tokenizer, tagger
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import (
    AutoModelForTokenClassification,
    DataCollatorForTokenClassification,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    pipeline,
)

import hies_export
from hies_export import DataError, RequestError, prune
from hies_export.calibrate.statistics import collect_statistics
from hies_export.data.batches import by_length
from hies_export.evaluate.interval import ratio_ends
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.recipe.sections import Columns, EvaluationSection, HeldOutSection
from hies_export.report.report import Report
from hies_export.tasks import Predictions
from hies_export.tasks.given import batches_of
from hies_export.tasks.labels import places_in_entities
from hies_export.tasks.token_classification import TokenClassification, entities_of
from hies_export.units.heads import find_attention

TASK = TokenClassification
METRICS = ("entity_f1", "word_accuracy", "own_entity_f1")
BOTH = ["attention", "mlp"]


def seqeval(module: str) -> Any:
    return pytest.importorskip(f"seqeval.metrics{module}", reason="seqeval is not installed: pip install -e .[test]")


def draw(tags: Sequence[str], count: int, *, seed: int = 0) -> list[list[str]]:
    chosen = random.Random(seed)
    return [chosen.choices(tags, k=chosen.randint(1, 12)) for _ in range(count)]


def task_of(names: Sequence[str]) -> TokenClassification:
    return TASK(SimpleNamespace(num_labels=len(names), id2label=dict(enumerate(names))))


def predictions(lines: Sequence[Sequence[str]], names: Sequence[str]) -> Predictions:
    numbers = torch.tensor([names.index(tag) for line in lines for tag in line], dtype=torch.int64)
    sample = torch.tensor([number for number, line in enumerate(lines) for _ in line], dtype=torch.int64)
    return Predictions("words", numbers, sample, joint=True)


def entities(tags: Sequence[str], names: Sequence[str] = TAGS) -> set[tuple[str, int, int]]:
    """Return the entities of a sentence in classes of these names."""
    places = places_in_entities(names)
    return entities_of([places[names.index(tag)] for tag in tags])


@pytest.mark.parametrize("lower", [False, True])
@pytest.mark.parametrize("prefixes", ["BI", "I", "BIES", "BMES"])
def test_entities_are_those_of_seqeval(prefixes: str, lower: bool) -> None:
    """seqeval knows no M: it is I in a scheme that has one only."""
    get_entities = seqeval(".sequence_labeling").get_entities
    given = prefixes.lower() if lower else prefixes
    names = ["o" if lower else "O", *(f"{prefix}-{kind}" for prefix in given for kind in ("x", "y-z"))]
    for tags in draw(names, 150):
        known = [tag[0].upper().replace("M", "I") + tag[1:] for tag in tags]
        wanted = {(kind, start, end + 1) for kind, start, end in get_entities(known)}
        assert entities(tags, names) == wanted, tags


@pytest.mark.parametrize(
    "names", [["O", "S", "VERB"], ["E-mail", "S-Bahn", "O"], ["S", "N", "B"], ["x-B", "I-x_y", "O"]]
)
def test_other_names_are_types_without_a_place(names: list[str]) -> None:
    for tags in draw(names, 50):
        kinds = ["x_y" if tag == "I-x_y" else tag for tag in tags]
        wanted = [(kind, n, n + 1) for n, kind in enumerate(kinds) if kind != "O"]
        found = entities(tags, names)
        assert {(kind, n) for kind, start, end in found for n in range(start, end)} == {of[:2] for of in wanted}
        assert "I-x_y" in names or found == set(wanted)


@pytest.mark.parametrize(
    ("tags", "wanted"),
    [
        ("B-x W-x M-x", {("x", 0, 1), ("x", 1, 2), ("x", 2, 3)}),
        ("B-x L-x U-x U-y B-x", {("x", 0, 2), ("x", 2, 3), ("y", 3, 4), ("x", 4, 5)}),
        ("NOUN NOUN O VERB", {("NOUN", 0, 1), ("NOUN", 1, 2), ("VERB", 3, 4)}),
        ("O O", set()),
        ("", set()),
    ],
)
def test_entities_by_hand(tags: str, wanted: set[tuple[str, int, int]]) -> None:
    assert entities(tags.split(), [*dict.fromkeys(tags.split())]) == wanted


def test_f1_is_that_of_seqeval_and_two_sentences_are_the_same_if_their_entities_are() -> None:
    metrics = seqeval("")
    wanted, dense = draw(TAGS, 200), draw(TAGS, 200, seed=1)
    lengths = [min(len(one), len(two)) for one, two in zip(wanted, dense, strict=True)]
    wanted, dense = ([line[:length] for line, length in zip(of, lengths, strict=True)] for of in (wanted, dense))
    chosen = random.Random(2)
    slim = [line if chosen.random() < 0.6 else [*line[:-1], "O"] for line in dense]
    # At the beginning both prefixes name the same entity.
    slim = [[line[0].replace("B-", "I-"), *line[1:]] for line in slim]
    labels = predictions(wanted, TAGS).values
    batches = [{"input_ids": labels[None], "labels": labels[None]}]
    judge = Judge(batches, predictions(dense, TAGS), METRICS, task_of(TAGS))
    found = judge.of(predictions(slim, TAGS))
    assert found.metrics["entity_f1"] == pytest.approx(metrics.f1_score(wanted, slim))
    assert found.metrics["word_accuracy"] == pytest.approx(metrics.accuracy_score(wanted, slim))
    assert found.metrics["own_entity_f1"] == pytest.approx(metrics.f1_score(dense, slim))
    same = [entities(one) == entities(two) for one, two in zip(dense, slim, strict=True)]
    assert judge.agreement(predictions(slim, TAGS)).tolist() == same
    assert found.stability == sum(same) / 200
    assert 0.5 < found.stability < 1 > found.metrics["own_entity_f1"] > found.metrics["entity_f1"]
    assert [words != other for words, other in zip(dense, slim, strict=True)] != [not one for one in same]


def test_a_share_of_entities_is_kept_by_an_interval_over_sentences() -> None:
    dense, chosen = draw(TAGS, 400), random.Random(3)
    slim = [line if chosen.random() < 0.9 else [*line[:-1], "O"] for line in dense]
    batches = [{"input_ids": torch.zeros(1, 1)}]
    judge = Judge(batches, predictions(dense, TAGS), METRICS[::-1], task_of(TAGS))
    pairs = [*zip(map(entities, dense), map(entities, slim), strict=True)]
    both, named = [2.0 * len(one & two) for one, two in pairs], [float(len(one) + len(two)) for one, two in pairs]
    share, low = judge.kept(predictions(slim, TAGS))
    assert share == pytest.approx(sum(both) / sum(named))
    assert low == pytest.approx(ratio_ends(torch.tensor(both), torch.tensor(named))[0])
    assert judge.kept(judge.dense)[0] == 1.0
    sentences = Judge(batches, judge.dense, METRICS, task_of(TAGS))
    assert sentences.kept(predictions(slim, TAGS))[0] == sentences.of(predictions(slim, TAGS)).stability


def read(count: int, *, labelled: bool = True, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    columns = {"text": ("tokens",), "label": "ner_tags" if labelled else None}
    rows = datasets.Dataset.from_list(sentences(count, seed=seed))
    return batches_of(
        tagger(), rows, what="batches", task=TASK(tagger().config), processor=tag_tokenizer(), columns=columns
    )


def inputs(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: batch[key] for key in ("input_ids", "attention_mask")}


def tags_of(model: PreTrainedModel, batches: Sequence[dict[str, torch.Tensor]]) -> list[list[str]]:
    """Return the tag of every first token, sample by sample, each in a pass of its own."""
    found = []
    for row in one_by_one(batches):
        with torch.no_grad():
            numbers = model(input_ids=row["input_ids"]).logits[0].argmax(-1)[row["judged"][0]]
        found.append([model.config.id2label[int(number)] for number in numbers])
    return found


@pytest.mark.parametrize("labelled", [True, False])
def test_heads_are_scored_by_the_loss_of_each_sentence(labelled: bool) -> None:
    model, batches = tagger(), read(20, labelled=labelled)
    sites = find_attention(model, inputs(batches[0]))
    found = collect_statistics(model, batches, sites)
    assert found.calibration.labels == ("data" if labelled else "predictions")
    if not labelled:
        for batch in batches:
            with torch.no_grad():
                own = model(**inputs(batch)).logits.argmax(-1)
            batch["labels"] = own.where(batch["judged"], -100)
    rows = [inputs(row) | {"labels": row["labels"]} for row in one_by_one(batches)]
    expected = naive_statistics(model, rows, sites)
    for what in ("his", "fisher"):
        for site in sites:
            torch.testing.assert_close(found[what][site.name], expected[what][site.name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("labelled", [True, False])
def test_predictions_are_those_of_each_sentence_by_itself(labelled: bool) -> None:
    model, batches = tagger(), read(40, labelled=labelled)
    dense = predict(model, batches)
    wanted = tags_of(model, batches)
    assert [TAGS[number] for number in dense.values] == [tag for tags in wanted for tag in tags]
    task = task_of(TAGS)
    assert task.entities(dense, dense.values) == [entities(tags) for tags in wanted]
    in_order = predict(model, by_length(batches, config=model.config))
    assert sorted(map(sorted, task.entities(in_order, in_order.values))) == sorted(map(sorted, map(entities, wanted)))


def wrapped(model: Any, before: Any) -> PreTrainedTokenizerFast:
    """Return the tokenizer of a model of tokens, with [CLS] and [SEP], and of what cuts texts before it."""
    backend = Tokenizer(model)
    if before is not None:
        backend.pre_tokenizer = before
    ends = [(token, backend.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    backend.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=ends)
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_max_length=64, **special)


SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
HAN = "住在北京上海的王明和李静去了"


def characters(letters: str, before: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer like SentencePiece's, which does not mark the pieces of words."""
    tokens = [(token, 0.0) for token in SPECIAL] + [("▁", -1.0)] + [(letter, -3.0) for letter in letters]
    return wrapped(models.Unigram(tokens, unk_id=1), before)


def pieces(letters: str, before: Any) -> PreTrainedTokenizerFast:
    """Return a tokenizer of WordPiece, which marks what goes on with a word."""
    tokens = [*SPECIAL, *letters, *(f"##{letter}" for letter in letters)]
    numbers = {token: number for number, token in enumerate(tokens)}
    return wrapped(models.WordPiece(numbers, unk_token="[UNK]"), before)


def in_characters(of: set[tuple[str, int, int]], text: str, tokenizer: Any, *, by_word: bool) -> set[Any]:
    """Return entities with the characters where they begin and end, where each word or each token counts as a word."""
    found = tokenizer(text)
    words = [word for word in found.word_ids() if word is not None]
    tokens = [token for token, word in enumerate(found.word_ids()) if word is not None]
    counted = (
        [found.word_to_chars(word) for word in dict.fromkeys(words)] if by_word else map(found.token_to_chars, tokens)
    )
    places = [*counted]
    return {(kind, places[first].start, places[end - 1].end) for kind, first, end in of}


@pytest.mark.parametrize(
    ("tokenizer", "letters", "strategy"),
    [
        (characters(HAN, pre_tokenizers.Metaspace()), HAN, "simple"),
        (characters(HAN, None), HAN, "simple"),
        (characters("EUKomis-", pre_tokenizers.Metaspace()), "EUKomis-  ", "simple"),
        (pieces(HAN, pre_tokenizers.BertPreTokenizer()), HAN, "simple"),
        (pieces("EUKomis-", pre_tokenizers.BertPreTokenizer()), "EUKomis-  ", "first"),
        (pieces("EUKomis-", pre_tokenizers.WhitespaceSplit()), "EUKomis-  ", "first"),
    ],
    ids=["characters", "no pre-tokenizer", "no marks", "script without spaces", "words", "words of spaces"],
)
def test_entities_of_a_text_are_those_of_the_pipeline(
    tokenizer: PreTrainedTokenizerFast, letters: str, strategy: str
) -> None:
    model, chance = tagger(), random.Random(0)
    texts = ["a" + "".join(chance.choices(letters, k=12)) for _ in range(24)]
    texts = [text[1:].strip() or letters[0] for text in texts]
    task = reading(TASK.name, columns=Columns(text=("text",)), config=model.config, processor=tokenizer)
    found = predict(model, task.read(datasets.Dataset.from_dict({"text": texts}), size=8), task=task)
    find = pipeline("token-classification", model=model, tokenizer=tokenizer, aggregation_strategy=strategy)
    wanted = [{(one["entity_group"], one["start"], one["end"]) for one in find(text)} for text in texts]
    by_word = strategy == "first"
    for of, text, expected in zip(task.entities(found, found.values), texts, wanted, strict=True):
        assert in_characters(of, text, tokenizer, by_word=by_word) == expected
    assert len({kind for of in wanted for kind, *_ in of}) > 1
    assert sum(map(len, wanted)) > 24


def test_spans_of_a_text_are_its_entities() -> None:
    rows = [
        {"text": "王明住在上海", "spans": [("name", 0, 2), ("place", 4, 6)]},
        {"text": "王明李静去了", "spans": [("name", 0, 2), ("name", 2, 4)]},
        {"text": "去了", "spans": []},
    ]
    names, model = ("label", "start", "end"), tagger()
    fields = [{**row, "spans": [dict(zip(names, span, strict=True)) for span in row["spans"]]} for row in rows]
    for tokenizer in (characters(HAN, pre_tokenizers.Metaspace()), pieces(HAN, pre_tokenizers.WhitespaceSplit())):
        columns = Columns(text=("text",), label="spans")
        task = reading(TASK.name, columns=columns, config=model.config, processor=tokenizer)
        batches = task.read(datasets.Dataset.from_list(fields), size=2)
        found = predict(model, batches, task=task)
        for of, row in zip(task.entities(found, task.references(batches)), rows, strict=True):
            assert in_characters(of, row["text"], tokenizer, by_word=False) == set(row["spans"])


def same_and_shared(dense: list[list[str]], slim: list[list[str]]) -> tuple[float, float]:
    """Return the share of sentences whose entities are the same, and the F1 of the entities of all."""
    pairs = [(entities(one), entities(two)) for one, two in zip(dense, slim, strict=True)]
    both, named = sum(len(one & two) for one, two in pairs), sum(len(one) + len(two) for one, two in pairs)
    return sum(one == two for one, two in pairs) / len(pairs), 2 * both / named


def tokenize(count: int) -> list[dict[str, Any]]:
    """Return rows as scripts for training make them."""
    tokenizer, rows = tag_tokenizer(), []
    for row in sentences(count):
        found = tokenizer(row["tokens"], is_split_into_words=True, return_token_type_ids=False)
        words = found.word_ids()
        labels = [
            -100 if word is None or word == last else TAGS.index(row["ner_tags"][word])
            for word, last in zip(words, [None, *words[:-1]], strict=True)
        ]
        rows.append({**found, "labels": labels})
    return rows


@pytest.mark.parametrize(("given", "labelled"), [("collated", True), ("tokenised", False), ("tokenised", True)])
def test_what_training_reads_is_pruned_in_memory(given: str, labelled: bool) -> None:
    model, rows = tagger(), tokenize(64)
    kept = rows if labelled else [{key: row[key] for key in ("input_ids", "attention_mask")} for row in rows]
    batches: Any = datasets.Dataset.from_list(kept)
    if given == "collated":
        collate = DataCollatorForTokenClassification(tag_tokenizer())
        batches = [dict(collate(kept[start : start + 8])) for start in range(0, len(kept), 8)]
    how: dict[str, Any] = {"criterion": "compensated", "compensation": {"method": "least_squares"}, "modules": BOTH}
    result = prune(model, batches, budget={"flops": 0.8}, processor=tag_tokenizer(), **how)
    held_out = result.pruning.rows.held_out
    # Without labels, nothing tells the first token of a word from others. Refitting needs no labels, but their places.
    first = {tuple(row["input_ids"]): torch.tensor(row["labels"]) != -100 for row in rows}
    for batch in result.pruning.rows.refit:
        for ids, mask, judged in zip(batch["input_ids"], batch["attention_mask"].bool(), batch["judged"], strict=True):
            places = first[tuple(ids[mask].tolist())]
            assert int(judged.sum()) == (int(places.sum()) if labelled else len(places))
    assert not any("labels" in batch for batch in result.pruning.rows.refit)
    dense, slim = (tags_of(one, held_out) for one in (model, result.model))
    found = result.held_out
    assert found is not None
    assert list(found.metrics) == [*METRICS]
    assert "same entities (F1)" in str(result)
    assert (found.stability, found.metrics["own_entity_f1"].slim) == pytest.approx(same_and_shared(dense, slim))
    assert found.metrics["own_entity_f1"].dense == 1.0


def test_samples_without_a_word_are_refused() -> None:
    batch = {"input_ids": torch.ones(2, 4, dtype=torch.int64), "labels": torch.full((2, 4), -100)}
    with pytest.raises(DataError, match="every sample must have a word to classify, but batch 0"):
        prune(tagger(), [batch] * 4, criterion="l2", budget={"heads": 0.3})


MODULES = {"modules": BOTH, "criterion": "compensated", "compensation": {"samples": 80}}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run."""
    torch.manual_seed(0)
    folder, prune = tmp_path_factory.mktemp("tags"), {**MODULES, "budget": {"flops": 0.8}}
    sizes = {"hidden_size": 120, "intermediate_size": 256, "num_hidden_layers": 1}
    recipe = save_tagger(folder, prune=prune, model=sizes)
    with without_tracing():
        assert hies("run", recipe) == 0
    return recipe.parent / "out"


def test_a_run_judges_what_it_writes(out: Path) -> None:
    report, batches = Report.from_file(out), read(60, seed=1)
    dense = AutoModelForTokenClassification.from_pretrained(out.parent / "model")
    slim = hies_export.load(out / "slim")
    same, shared = same_and_shared(tags_of(dense, batches), tags_of(slim, batches))
    assert (report.stability, report.metrics["own_entity_f1"].slim) == pytest.approx((same, shared))
    assert report.cut_max_abs < 1e-4
    text = " ".join((out / "report.md").read_text().split())
    assert f"| same sentence | | {report.stability:.1%} |" in text
    assert f"| same entities (F1) | | {shared:.1%} |" in text


def test_the_card_shows_how_to_find_entities(out: Path) -> None:
    card = (out / "slim" / "README.md").read_text()
    assert "pipeline_tag: token-classification" in card
    (snippet,) = (code for code in card.split("```python\n") if "pipeline(" in code)
    code = snippet.split("```")[0].replace('"slim"', repr(str(out / "slim"))).replace("a text", "ab cd efg")
    known: dict[str, Any] = {}
    exec(code, known)
    slim = hies_export.load(out / "slim")
    encoded = tag_tokenizer()("ab cd efg", return_tensors="pt")
    (row,) = slim(**{key: encoded[key] for key in ("input_ids", "attention_mask")}).logits.argmax(-1).tolist()
    first = [encoded.word_ids().index(word) for word in range(3)]
    wanted = [(kind, end - start) for kind, start, end in sorted(entities([TAGS[row[t]] for t in first]))]
    found = [(one["entity_group"], len("ab cd efg"[one["start"] : one["end"]].split())) for one in known["found"]]
    assert sorted(found) == sorted(wanted)


def test_a_promise_over_entities_needs_fewer_rows_than_one_over_sentences(tmp_path: Path) -> None:
    """Two thirds of 200 rows are held out, as 97 % takes 130 for entities. It takes 203 for sentences."""
    recipe = PruningRecipe.from_yaml(save_tagger(tmp_path, validation=200, prune={"budget": {"heads": 0.3}}))
    evaluation = EvaluationSection(split="validation", metrics=["own_entity_f1", "entity_f1", "word_accuracy"])
    over_entities = recipe.model_copy(update={"evaluation": evaluation})
    held_out = HeldOutSection(split="validation", samples=133)
    assert load_recipe(over_entities.to_deploy(keep=0.97))[1].splits.held_out == held_out
    with pytest.raises(RequestError, match="from 194 held-out rows or more, and there are 80"):  # of those to train on
        load_pruning(recipe.to_deploy(keep=0.97))
