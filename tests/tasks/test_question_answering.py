"""Answers to questions: their best places, metrics, scores, cuts, exports and runs."""

import json
import re
import string
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from datasets import Dataset
from support.answers import letter_tokenizer, questions, reading_model, save_questions
from support.loading import load_pruning
from support.models import shake
from support.reading import reading
from support.runs import hies
from torch import Tensor
from transformers import AutoModelForQuestionAnswering, LlamaConfig, LlamaForQuestionAnswering

from hies_export import DataError, HiesError, PruneResult, load, masked_units, prune
from hies_export.calibrate.statistics import collect_statistics
from hies_export.data.batches import inputs_of, samples_of
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict, predict_by
from hies_export.pipeline.recipe import PruningRecipe
from hies_export.recipe.sections import Columns
from hies_export.report.report import Report
from hies_export.tasks import task_of
from hies_export.tasks.given import batches_of
from hies_export.tasks.question_answering import LONGEST, QuestionAnswering
from hies_export.units.find import find_modules

TASK = QuestionAnswering(None)
BOTH = ["attention", "mlp"]


def read(rows: Dataset, **fields: Any) -> list[dict[str, Tensor]]:
    columns = Columns(text=("question", "context"), label="answers")
    usual = {"config": reading_model().config, "processor": letter_tokenizer()}
    return reading(TASK.name, columns=columns, **(usual | fields)).read(rows, size=4)


def naive_best(batch: Mapping[str, Tensor], logits: Tensor) -> list[tuple[int, int, float]]:
    """Return where the answer of each window begins and ends, and its score, from all pairs of tokens."""
    found = []
    for of_row, begins, ends in zip(logits, batch["begins"].tolist(), batch["ends"].tolist(), strict=True):
        first, last = best_pair(of_row, [token for token, place in enumerate(begins) if place >= 0])
        found.append((begins[first], ends[last], float(of_row[0, first] + of_row[1, last])))
    return found


def best_pair(logits: Tensor, inside: Sequence[int]) -> tuple[int, int]:
    """Return the first and the last token of the best answer among these tokens; logits are (2, tokens)."""
    pairs = [(first, last) for first in inside for last in inside if first <= last < first + LONGEST]
    return max(pairs, key=lambda pair: float(logits[0, pair[0]] + logits[1, pair[1]]))


def test_the_best_answer_of_a_window_is_that_of_all_pairs() -> None:
    generator = torch.Generator().manual_seed(0)
    for number, batch in enumerate(read(questions(12, words=(1, 55)))):
        logits = torch.randn(len(batch["input_ids"]), 2, batch["input_ids"].shape[1], generator=generator)
        if number:  # then the longest answers are the best
            logits += torch.linspace(0, 60, logits.shape[-1]) * torch.tensor([[-1.0], [1.0]])
        spans, scores = TASK.keep(logits, batch)
        assert torch.cat([spans, scores[:, None]], 1).tolist() == pytest.approx(np.array(naive_best(batch, logits)))


def test_padding_is_no_answer() -> None:
    model, batch = reading_model(), positions()
    real = batch["attention_mask"][:, None] != 0
    output = torch.randn(8, 2, 12)
    low, high = (output.masked_fill(~real, value) for value in (-9, 9))
    for found in (TASK.own_labels(model, batch, high), TASK.keep(high, batch)[0] - torch.tensor([0, 1])):
        assert (found < batch["attention_mask"].sum(-1)[:, None]).all()
    for index in (0, 1):
        one, other = (TASK.effect(model, batch, of, index) for of in (low, high))
        assert torch.equal(one, other)


def test_the_answer_in_several_windows_is_that_in_a_long_one() -> None:
    """Logits depend on the token's place in its context alone, so that windows change nothing but the division."""
    rows, generator = questions(6, words=(60, 300)), torch.Generator().manual_seed(0)
    at_place = torch.randn(2, 1000, generator=generator)
    config = reading_model(max_position_embeddings=512).config

    def forward(batch: Mapping[str, Tensor]) -> Tensor:
        return at_place[:, batch["begins"].clamp(min=0)].transpose(0, 1)

    found = []
    for length in (100, 500):
        batches = read(rows, config=config, processor=letter_tokenizer(model_max_length=512), max_length=length)
        assert samples_of(batches) == len(rows)
        found.append(predict_by(forward, batches, TASK))
    assert sum(len(batch["question"]) for batch in batches) == len(rows)
    assert TASK.same(*found).all()
    assert torch.equal(found[0].values, found[1].values)


def squad(given: str, right: Sequence[str]) -> tuple[float, float]:
    """Return exact match and F1 as the paper of SQuAD says, for one answer and several right ones."""

    def words(text: str) -> list[str]:
        text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
        return [word for word in text.split() if word not in ("a", "an", "the")]

    best = 0.0
    for text in right:
        one, other, common = words(given), words(text), 0
        left = list(other)
        for word in one:
            if word in left:
                left.remove(word)
                common += 1
        if not one or not other:
            best = max(best, float(one == other))
        elif common:
            precision, recall = common / len(one), common / len(other)
            best = max(best, 2 * precision * recall / (precision + recall))
    return float(any(words(given) == words(text) for text in right)), best


def test_exact_match_and_f1_are_those_of_the_paper() -> None:
    texts = ["The b c.", "b", "a the", "b  c b d", "C, B", "An e f", "...", "e"]
    rows = [(given, [first, second]) for given in texts for first in texts for second in texts[::3]]
    contexts = ["|".join([given, *right]) for given, right in rows]
    spans, wanted = [], []
    for given, right in rows:
        ends = np.cumsum([len(given), *(len(text) + 1 for text in right)]).tolist()
        spans.append([0, ends[0]])
        wanted.append([[end - len(text), end] for end, text in zip(ends[1:], right, strict=True)])
    points = [torch.tensor([*map(ord, context)]) for context in contexts]
    context = torch.nn.utils.rnn.pad_sequence(points, batch_first=True, padding_value=-1)
    batch = {"question": torch.arange(len(rows)), "context": context, "answers": torch.tensor(wanted)}
    batch["labels"] = torch.zeros(len(rows), 2, dtype=torch.int64)
    found = TASK.join([(torch.tensor(spans), torch.zeros(len(rows)))], [batch])
    values = Judge([batch], found, TASK.metrics, TASK).of(found).metrics
    naive = np.array([squad(given, right) for given, right in rows])
    assert 0 < naive[:, 0].mean() < naive[:, 1].mean() < 1
    assert values == {"answer_exact": pytest.approx(naive[:, 0].mean()), "answer_f1": pytest.approx(naive[:, 1].mean())}


def gated(model: Any, modules: Sequence[Any], batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of a sample's loss to a factor of one for every unit, by hand."""
    factors = {module.name: torch.ones(module.units, requires_grad=True) for module in modules}
    hooks = []
    for module in modules:

        def multiply(_: Any, inputs: Any, factor: Tensor = factors[module.name]) -> Tensor:
            return (inputs[0].unflatten(-1, (len(factor), -1)) * factor[:, None]).flatten(-2)

        hooks.append(model.get_submodule(module.consumer).register_forward_pre_hook(multiply))
    loss = model(**batch).loss
    for hook in hooks:
        hook.remove()
    return dict(zip(factors, torch.autograd.grad(loss, [*factors.values()]), strict=True))


@pytest.mark.parametrize("labelled", [True, False])
def test_scores_are_those_of_samples_one_at_a_time(labelled: bool) -> None:
    model, batches = reading_model(), read(questions(6, words=(5, 30)), max_length=24)
    modules = find_modules(model, batches[0], kinds=BOTH)
    given = batches if labelled else [{k: v for k, v in batch.items() if k != "labels"} for batch in batches]
    found = collect_statistics(model, given, modules)
    expected: dict[str, list[Tensor]] = {module.name: [] for module in modules}
    for batch in batches:
        for row in range(len(batch["labels"])):
            one = {key: value[row : row + 1] for key, value in inputs_of(batch).items()}
            ends = batch["labels"][row]
            if not labelled:
                output, real = model(**one), int(one["attention_mask"].sum())
                ends = torch.stack([of[0, :real].argmax() for of in (output.start_logits, output.end_logits)])
            one |= {"start_positions": ends[:1], "end_positions": ends[1:]}
            for name, gradient in gated(model, modules, one).items():
                expected[name].append(gradient.abs().double())
    for name, gradients in expected.items():
        torch.testing.assert_close(found["his"][name], torch.stack(gradients).mean(0), rtol=1e-4, atol=1e-7)


@pytest.fixture(scope="module")
def pruned() -> PruneResult:
    torch.manual_seed(0)
    rows = questions(24, words=(5, 90))
    how: dict[str, Any] = {"criterion": "his", "compensation": None, "modules": BOTH}
    return prune(reading_model(num_hidden_layers=2), rows, budget={"flops": 0.6}, processor=letter_tokenizer(), **how)


def test_a_data_set_is_divided_between_questions(pruned: PruneResult) -> None:
    """The windows of one question are all scored on, or all held out."""
    calibration, held_out = (
        ["".join(map(chr, row[row >= 0].tolist())) for batch in of for row in batch["context"]]
        for of in (pruned.pruning.rows.score, pruned.pruning.rows.held_out)
    )
    rows = questions(24, words=(5, 90))["context"][:]
    assert set(calibration).isdisjoint(held_out)
    assert set(calibration) | set(held_out) == set(rows)
    assert set(held_out) != set(rows[18:])
    assert len(calibration) > 18
    assert len(held_out) > 6
    assert "same prediction, 6 held-out rows" in str(pruned)
    assert {*pruned.held_out.metrics} == {"answer_f1", "answer_exact"}


def test_the_cut_model_is_the_masked_one(pruned: PruneResult) -> None:
    assert pruned.plan.removed > 0
    for batch in pruned.pruning.rows.held_out:
        with torch.no_grad():
            slim = pruned.model(**inputs_of(batch))
            with masked_units(pruned.pruning.model, pruned.plan, pruned.pruning.modules):
                masked = pruned.pruning.model(**inputs_of(batch))
        for name in ("start_logits", "end_logits"):
            torch.testing.assert_close(getattr(slim, name), getattr(masked, name), rtol=1e-4, atol=1e-5)


def positions() -> dict[str, Tensor]:
    """Return a batch as a user makes it for training, with padding."""
    row, ids = torch.arange(8), torch.randint(4, 40, (8, 12))
    mask = (torch.arange(12) < row[:, None] % 4 + 9).long()
    return {"input_ids": ids, "attention_mask": mask, "start_positions": row % 5, "end_positions": row % 5 + 2}


@pytest.mark.parametrize(("form", "labelled"), [("dicts", False), ("rows", False), ("rows", True)])
def test_batches_of_a_training_loop_are_pruned(form: str, labelled: bool) -> None:
    model, batches = reading_model(), [positions(), positions()]
    if not labelled:
        batches = [{k: v for k, v in batch.items() if k[-1] != "s" or k == "input_ids"} for batch in batches]
    given: Any = batches
    if form == "rows":
        given = Dataset.from_dict({key: torch.cat([batch[key] for batch in batches]).tolist() for key in batches[0]})
    result = prune(model, given, budget={"heads": 0.3}, criterion="his", processor=letter_tokenizer())
    batch = result.pruning.rows.held_out[0]
    with torch.no_grad():
        output = model(**inputs_of(batch))
    logits, real = torch.stack([output.start_logits, output.end_logits], 1), batch["attention_mask"].sum(-1)
    best = [best_pair(of_row, range(count)) for of_row, count in zip(logits, real.tolist(), strict=True)]
    found = predict(model, [batch])
    assert found.values.tolist() == [[first, last + 1] for first, last in best]
    assert ("labels" in batch) == labelled
    if labelled:
        right = TASK.references([batch])
        exact = (found.values == right[:, 0]).all(-1).double()
        assert TASK.table(found, right)[0]["exact"].tolist() == exact.tolist()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"end_positions": None}, "start_positions and end_positions must be the int64 numbers"),
        ({"start_positions": torch.full((8,), -100)}, "must be the int64 numbers of the first"),
        ({"start_positions": torch.zeros(8)}, "must be the int64 numbers"),
    ],
)
def test_positions_that_are_no_tokens_are_refused(change: dict[str, Any], message: str) -> None:
    batch = {key: value for key, value in (positions() | change).items() if value is not None}
    with pytest.raises(DataError, match=message):
        prune(reading_model(), [batch], budget={"heads": 0.3})


def test_a_decoder_reads_questions_with_padding_on_any_side() -> None:
    """The tokenizer of a decoder pads on the left and has no segments."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    model = shake(LlamaForQuestionAnswering(LlamaConfig(vocab_size=40, max_position_embeddings=64, **sizes)))
    tokenizer, rows = letter_tokenizer(padding_side="left"), questions(12, words=(5, 30))
    how: dict[str, Any] = {"what": "batches", "task": task_of(model), "processor": tokenizer, "columns": None}
    batches = batches_of(model, rows, **how)
    for batch in batches:
        ends = (batch[key].gather(1, batch["labels"])[:, end] for end, key in enumerate(("begins", "ends")))
        assert torch.equal(torch.stack([*ends], 1), batch["answers"][:, 0])
    alone = [predict(model, batches_of(model, rows.select([n]), **how)).values for n in range(len(rows))]
    assert torch.equal(predict(model, batches).values, torch.cat(alone))
    assert prune(model, rows, budget={"heads": 0.3}, processor=tokenizer).held_out is not None


def test_metrics_of_other_tasks_are_refused(tmp_path: Path) -> None:
    recipe = save_questions(tmp_path, train=20, validation=10, prune={"budget": {"heads": 0.3}})
    with pytest.raises(HiesError, match="must be among answer_f1, answer_exact, got 'accuracy'"):
        load_pruning(PruningRecipe.from_yaml(recipe, {"evaluation.metrics": ["accuracy"]}))


@pytest.mark.slow
def test_a_run_judges_what_it_writes_also_in_8_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = save_questions(
        tmp_path,
        train=12,
        validation=20,
        calibration={"samples": 8, "batch_size": 4},
        evaluation={"batch_size": 5},
        prune={"criterion": "his", "budget": {"heads": 0.25}},
        export={"quantize": "int8"},
        measure={"shapes": [[2, 16]], "repeats": 2, "runtimes": ["torch"]},
    )
    wide = {"hidden_size": 128, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 1}
    reading_model(**wide).save_pretrained(tmp_path / "model")
    assert hies("run", recipe) == 0
    report = Report.from_file(tmp_path / "out")
    slim = load(tmp_path / "out" / "slim")
    rows = [json.loads(line) for line in (tmp_path / "validation.jsonl").read_text().splitlines()]
    session = onnxruntime.InferenceSession(tmp_path / "out" / report.exported.file)
    assert [node.name for node in session.get_outputs()] == ["start_logits", "end_logits"]
    assert report.onnx_max_abs is not None
    assert report.onnx_max_abs < 1e-3
    dense = AutoModelForQuestionAnswering.from_pretrained(tmp_path / "model")
    models = {"dense": dense, "slim": slim, "int8": session}
    answers = {name: [answer(of, row) for row in rows] for name, of in models.items()}
    right = [row["answers"]["text"] for row in rows]
    naive = {name: np.mean([*map(squad, of, right)], axis=0) for name, of in answers.items()}
    for name in ("dense", "slim"):
        for metric, value in zip(("answer_exact", "answer_f1"), naive[name], strict=True):
            assert getattr(report.metrics[metric], name) == pytest.approx(value)
    assert report.stability == pytest.approx(np.mean([*map(str.__eq__, answers["slim"], answers["dense"])]), abs=0.051)
    assert report.exported.quality == {"metric": "answer_f1", "value": pytest.approx(naive["int8"][1])}
    card = (tmp_path / "out" / "slim" / "README.md").read_text()
    assert "pipeline_tag: question-answering" in card
    code = next(block for block in re.findall(r"```python\n(.*?)```", card, re.DOTALL) if "AutoTokenizer" in block)
    code = code.replace('"Who asks?"', repr(rows[0]["question"])).replace('"A reader asks."', repr(rows[0]["context"]))
    monkeypatch.chdir(tmp_path / "out")
    names: dict[str, Any] = {}
    exec(code, names)
    assert names["answer"] == answers["slim"][0]


def answer(model: Any, row: Mapping[str, Any]) -> str:
    """Return the answer of one row, which fits a window, by the words of both texts."""
    tokenizer = letter_tokenizer()
    given = tokenizer(row["question"], row["context"], return_tensors="pt", return_offsets_mapping=True)
    places = given.pop("offset_mapping")[0].tolist()
    if isinstance(model, onnxruntime.InferenceSession):
        feeds = {node.name: given[node.name].numpy() for node in model.get_inputs()}
        logits = torch.tensor(np.stack(model.run(None, feeds)))
    else:
        with torch.no_grad():
            output = model(**given)
        logits = torch.stack([output.start_logits, output.end_logits])
    inside = [token for token, number in enumerate(given.sequence_ids()) if number == 1]
    first, last = best_pair(logits[:, 0], inside)
    return row["context"][places[first][0] : places[last][1]]
