"""What to deploy: the fastest form that keeps the promise, again by hand; what is proposed, and what is refused."""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from scipy.stats import binomtest
from support.answers import reading_model
from support.hub import Hub
from support.loading import load_pruning, recipe_of
from support.models import causal_lm, save_regressor, save_text_model
from support.references import same_in_onnxruntime
from support.runs import deploy_on, hies
from transformers import BertForNextSentencePrediction, BertModel

from hies_export import DataError, ExportError, PlanError, PruningRecipe, RecipeError, Report, RequestError, deploy
from hies_export.data.batches import samples_of
from hies_export.evaluate.interval import Looks
from hies_export.evaluate.judge import Judge
from hies_export.evaluate.predict import predict
from hies_export.forms.deployment import DeployWay, try_dense
from hies_export.forms.form import Form, Forms
from hies_export.pipeline import choose as choosing
from hies_export.pipeline import delivery as delivery_file
from hies_export.pipeline import fastest, measure, stages
from hies_export.pipeline import pruning as pruning_file
from hies_export.pipeline.fastest import Decision, find_fastest
from hies_export.pipeline.load_recipe import load_recipe
from hies_export.pipeline.propose import propose_recipe
from hies_export.pipeline.pruning import Rows
from hies_export.pipeline.recipe import parse_yaml
from hies_export.pipeline.stages import calibrate
from hies_export.recipe.budget import Found
from hies_export.recipe.sections import DeploySection
from hies_export.slim.bundles import flops_table
from hies_export.tasks import COLUMNS


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A regressor, whose predictions all differ, its data, and a recipe of both kinds."""
    prune = {
        "modules": ["attention", "mlp"],
        "criterion": "fisher",
        "budget": {"keep": 0.5},
        "compensation": {"samples": 60},
    }
    return save_regressor(tmp_path_factory.mktemp("deploy"), layers=1, prune=prune)


def test_the_form_to_deploy_is_the_fastest_that_keeps_the_promise(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choosing, "SIZES", 3)
    deploy_on(monkeypatch, "onnxruntime-cpu", "onnxruntime-cpu-int8")
    # All heads stay, and yet the models are not the same.
    recipe, out = folder / "recipe.yaml", tmp_path / "out"
    assert hies("deploy", recipe, "--set", "prune.modules=[mlp]", "--keep", "0.25", "-o", out) == 0
    report = Report.from_file(out)
    found = report.details.deployment
    served, refused = found.ways
    # The tiny model has no layer that is worth 8 bits.
    assert (refused.runtime, refused.kept) == ("onnxruntime-cpu-int8", None)
    assert "16,384" in str(refused.problem)
    assert (served.kept, served.dense_ratio) == (1.0, 1.0)
    assert 0 < served.flops < 1
    dense, slim = report.details.forms
    times = {0: 1.0, 1: slim.times[found.step].ratio}
    keeping = [number for number, form in enumerate((dense, slim)) if form.at_least >= 0.25]
    assert found.form == min(keeping, key=lambda number: times[number])
    rows = load_pruning(recipe_of(folder, output=out).to_deploy(keep=0.25)).rows.held_out
    same = same_in_onnxruntime(folder / "model", out / "onnx" / "model.onnx", rows, tolerance=0.02)
    low = binomtest(sum(same), len(same)).proportion_ci(Looks(2, bits=1).confidence, method="exact").low
    assert slim.kept == pytest.approx(sum(same) / len(same), abs=1.5 / len(same))
    assert slim.at_least == pytest.approx(low, abs=0.02)
    assert slim.at_least >= 0.25
    on_files = [row for row in served.judged if row["runtime"] == "onnxruntime-cpu"]
    assert slim.stability_low < slim.stability < slim.stability_high
    assert dense.stability_low < dense.stability == dense.stability_high == 1
    assert {"kept": slim.kept, "at_least": slim.at_least}.items() <= max(
        on_files, key=lambda row: row["removed"] if row["at_least"] >= 0.25 else 0
    ).items()
    assert {*report.seconds} == {"score", "cut", "export", "measure"}
    assert 0 < report.seconds["score"] < found.seconds
    written = json.loads((out / "report.json").read_text())
    assert written["details"]["deployment"]["form"] == found.form
    assert (out / "slim" / "config.json").is_file()


def test_a_promise_of_a_runtime_is_judged_on_its_files(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a budget of `keep` alone."""
    keep = {"predictions": 0.3, "runtime": "onnxruntime-cpu", "batch": 2, "sequence": 16}
    recipe = recipe_of(folder, output=str(tmp_path / "out"), prune__modules=["mlp"], prune__budget={"keep": keep})
    monkeypatch.setattr(choosing, "SIZES", 3)
    monkeypatch.setattr(
        delivery_file, "latency_table", lambda m, of, where, **_: flops_table(m, of, batch=where.batch, unit="group")
    )
    outcome = recipe.run().details.outcome
    rows = load_pruning(recipe).rows.held_out
    same = same_in_onnxruntime(folder / "model", tmp_path / "out" / "onnx" / "model.onnx", rows, tolerance=0.02)
    assert outcome.found.value == pytest.approx(sum(same) / len(same), abs=1.5 / len(same))
    assert outcome.budget.keep.runtime == "onnxruntime-cpu"


def test_where_no_cut_keeps_the_promise_the_dense_form_is_the_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy_on(monkeypatch)
    predicted = []
    for module in (pruning_file, stages):
        monkeypatch.setattr(
            module, "predict", lambda model, rows, **how: predicted.append(rows) or predict(model, rows, **how)
        )
    monkeypatch.setattr(choosing, "SIZES", 3)
    monkeypatch.setattr(Judge, "found", lambda *_: Found(0.0, 0.0))
    asked = {"keep": 0.5, "runtimes": ["onnxruntime-cpu"]}
    fields = ("--set", "prune.budget=null", "--set", f"deploy={json.dumps(asked)}", "--set", "measure.shapes=[]")
    assert hies("run", folder / "recipe.yaml", *fields, "-o", tmp_path / "out") == 0
    report = Report.from_file(tmp_path / "out")
    written = (tmp_path / "out" / "recipe.yaml").read_text()
    assert parse_yaml(written, source="recipe.yaml")["deploy"] == asked
    found = report.details.deployment
    assert f"deploy {tmp_path / 'out' / found.file}" in capsys.readouterr().out.splitlines()
    times = report.details.forms[0].times
    # No shapes are given, so rows are timed as they come: one at a time, in batches of 8, and all 14.
    assert [(time.batch, time.phase) for time in times] == [(1, "rows"), (8, "rows"), (14, "rows")]
    assert found.promise == report.details.outcome.budget.share == 0.5
    assert (found.form, [form.model for form in report.details.forms]) == (0, ["dense"])
    assert str(found.ways[0].search).startswith("keep asks for 50 % of")
    assert (report.neurons.removed, report.heads.removed, report.stability) == (0, 0, 1.0)
    rows = load_pruning(recipe_of(folder, output=tmp_path / "out")).rows.held_out
    same = same_in_onnxruntime(folder / "model", tmp_path / "out" / found.file, rows, tolerance=0.02)
    assert all(same)
    # The answer is the dense model, which predicts the evaluated and the held-out rows once.
    judged = [report.details.data.evaluation_samples, samples_of(rows)]
    assert [count for count in map(samples_of, predicted) if count in judged] == judged


def searched(recipe: PruningRecipe, *, keep: float) -> Decision:
    """Return what a search answers, without the run that follows."""
    pruning, delivery = load_recipe(recipe.to_deploy(keep=keep))
    forms = Forms({"dense": pruning.model}, delivery.exporter, recipe.output)
    return find_fastest(pruning, delivery, calibrate(pruning, reported=False), forms)


def test_a_runtime_that_fails_in_the_search_leaves_the_others(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predictor(exporter: Any, runtime: str, bits: str) -> Any:
        def fail(*_: Any) -> None:
            raise ExportError(f"ONNX Runtime must run the graph in {bits}, and stopped")

        return fail

    monkeypatch.setattr(choosing, "SIZES", 6)
    deploy_on(monkeypatch)
    monkeypatch.setattr(delivery_file, "predictor", predictor)
    answer = searched(recipe_of(folder, output=tmp_path / "out"), keep=0.4)
    (way,) = answer.ways
    assert way.search == "ONNX Runtime must run the graph in float32, and stopped"
    assert (answer.choice.plan.removed, way.problem) == (0, None)


def test_a_form_that_cannot_become_the_fastest_is_searched_no_further(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every cut keeps the promise in the faster form, and the dense model takes ten times as long in the slower one."""

    def slowed(*given: Any) -> list[DeployWay]:
        (fast,) = try_dense(*given)
        return [fast, replace(fast, runtime="openvino", bits="bfloat16", dense_ratio=10.0)]

    monkeypatch.setattr(choosing, "SIZES", 6)
    deploy_on(monkeypatch)
    monkeypatch.setattr(Judge, "found", lambda *_: Found(1.0, 1.0))
    monkeypatch.setattr(fastest, "try_dense", slowed)
    monkeypatch.setattr(fastest, "looks_of", lambda *_: Looks(2))
    answer = searched(recipe_of(folder, output=tmp_path / "out"), keep=0.4)
    fast, slow = answer.ways
    assert fast.search is None
    assert str(slow.search).startswith("no cut that keeps the promise here is faster than what was found")
    assert answer.choice.outcome.budget.timed.runtime == "onnxruntime-cpu"
    assert {row["runtime"] for row in fast.judged} == {"torch", "onnxruntime-cpu"}


def test_the_promise_of_a_recipe_is_its_goal(folder: Path) -> None:
    asked = {"keep": 0.5, "runtimes": ["onnxruntime-cpu"]}
    recipe = recipe_of(folder, prune__budget=None, deploy=asked)
    assert recipe.options.goal.keep.predictions == recipe.goal.keep.predictions == 0.5
    changed = recipe.to_deploy(keep=0.7)
    assert (changed.goal.keep.predictions, changed.deploy.runtimes) == (0.7, ("onnxruntime-cpu",))
    for change, said in (
        ({"prune.budget": {"flops": 0.5}}, "deploy chooses how much to remove, and prune.budget sets it too"),
        ({"deploy.keep": 1.5}, "deploy.keep must be less than 1, got 1.5"),
        ({"deploy.runtimes": ["openvno"]}, "a runtime must be one of .*, got 'openvno'; did you mean 'openvino'"),
    ):
        with pytest.raises(RecipeError, match=said):
            recipe.with_overrides(change)


def test_a_runtime_that_fails_is_left_out_by_its_reason(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: Any) -> None:
        raise ExportError("ONNX Runtime must run the graph, and stopped")

    deploy_on(monkeypatch)
    monkeypatch.setattr(Form, "predict", fail)
    with pytest.raises(PlanError, match="no runtime here serves the dense model: ONNX Runtime must run the graph"):
        deploy(recipe_of(folder, output=tmp_path / "out"), keep=0.4)
    assert "onnxruntime-cpu in float32 is left out: ONNX Runtime must run the graph, and stopped" in caplog.text
    with pytest.raises(RecipeError, match="runtimes to deploy on must be among onnxruntime-cpu, got torch"):
        deploy(recipe_of(folder, output=tmp_path / "out"), keep=0.5, runtimes=["torch"])
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_promised_of_the_slim_model_where_the_dense_one_breaks_the_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Seen:
        on_held_out: bool
        kept: float | None = None
        at_least: float | None = None

    def judge(forms: Any, rows: Any, held_out: Any, **_: Any) -> list[Seen]:
        return [Seen(held_out is not None)]

    monkeypatch.setattr(measure, "judge_forms", judge)
    monkeypatch.setattr(measure, "looks_of", lambda *_: Looks())
    ways = (DeployWay("r", "float32", kept=1.0, at_least=1.0), DeployWay("r", "int8", kept=0.9, at_least=0.8))
    pruning: Any = SimpleNamespace(judge=lambda *_, **__: "held out", rows=Rows([]), progress=None)
    delivery: Any = SimpleNamespace(deploy=DeploySection(keep=0.9))
    names = ("dense", "float32"), ("slim", "float32"), ("dense", "int8"), ("slim", "int8"), ("cascade", "int8")
    forms: Any = [SimpleNamespace(model=model, runtime="r", bits=bits) for model, bits in names]
    decision: Any = SimpleNamespace(ways=ways)
    measuring = measure.Measuring(pruning, delivery, None, decision, None)  # type: ignore[arg-type]
    found = measuring._judge(forms, "evaluated")  # type: ignore[arg-type]
    assert found == [Seen(False, 1.0, 1.0), Seen(True), Seen(False, 0.9, 0.8), Seen(False), Seen(True)]


PAIR = ("sentence1", "sentence2")


def proposed(model: Path, file: Path, row: dict[str, Any], **columns: Any) -> PruningRecipe:
    """Return the recipe for a model and a file of five rows."""
    file.write_text(5 * (json.dumps(row) + "\n"))
    return propose_recipe(str(model), files={"train": file}, output=file.parent, **columns)


def columns_of(recipe: PruningRecipe) -> dict[str, Any]:
    return {name: getattr(recipe.data, name) for name in COLUMNS if getattr(recipe.data, name)}


def test_a_model_and_its_rows_are_enough_for_a_recipe(folder: Path, tmp_path: Path) -> None:
    files = {"train": folder / "train.jsonl", "validation": folder / "validation.jsonl"}
    recipe = propose_recipe(str(folder / "model"), files=files, output=tmp_path)
    (column,) = recipe.data.text
    assert column in json.loads(files["train"].read_text().splitlines()[0])
    assert (recipe.task, recipe.data.label, recipe.evaluation.split) == ("text-classification", "label", "validation")
    alone = propose_recipe(str(folder / "model"), files={"rows": files["train"]}, output=tmp_path)
    assert (alone.calibration.split, alone.evaluation.split) == ("rows[:80%]", "rows[80%:]")
    assert (recipe.data.shuffled, alone.data.shuffled) == (False, True)
    pair = {"sentence1": "a b", "sentence2": "c", "genre": "news", "score": 1.0}
    for named, columns in (({}, {"text": PAIR}), ({"text": ["genre"], "label": "score"}, {"text": ("genre",)})):
        found = columns_of(proposed(folder / "model", tmp_path / "pair.jsonl", pair, **named))
        assert found == columns | ({"label": "score"} if named else {})


@pytest.mark.parametrize(("rows", "scored", "held_out"), [(150, 40, 80), (30, 8, 16)])
def test_of_few_rows_most_are_left_for_the_promise(
    folder: Path, tmp_path: Path, rows: int, scored: int, held_out: int
) -> None:
    file = tmp_path / "few.jsonl"
    given = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:rows]]
    # No two alike: the first word says the number in binary.
    apart = [{**row, "text": " ".join("ab"[int(bit)] for bit in f"{n:08b}")} for n, row in enumerate(given)]
    file.write_text("".join(json.dumps(row) + "\n" for row in apart))
    recipe = propose_recipe(str(folder / "model"), files={"train": file}, output=tmp_path)
    found = load_pruning(recipe.to_deploy(keep=0.3)).rows
    assert (samples_of(found.score), samples_of(found.held_out)) == (scored, held_out)


def test_labels_of_other_names_that_nobody_asked_for_are_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model, file = save_text_model(tmp_path / "model"), tmp_path / "rows.jsonl"
    asked: dict[str, Any] = {"files": {"train": file}, "output": tmp_path}
    for labels, read in ((("LABEL_0", "LABEL_1"), "label"), (("no", "yes"), None), ((0, -1), None)):
        rows = [{"text": f"good {number}", "label": labels[number % 2]} for number in range(20)]
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        assert propose_recipe(str(model), **asked).data.label == read
    assert "'label' is not read, as answers are kept without labels: the class names in 'label' must" in caplog.text
    assert propose_recipe(str(model), **asked, label="label").data.label == "label"


@pytest.fixture(scope="module")
def models(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A saved model for each task whose columns are known by their names; `classes` has no group of candidates."""
    place = tmp_path_factory.mktemp("models")
    BertModel.from_pretrained(folder / "model").save_pretrained(place / "feature-extraction")
    causal_lm().save_pretrained(place / "text-generation")
    reading_model().save_pretrained(place / "question-answering")
    save_text_model(place / "classes")
    return {path.name: path for path in place.iterdir()} | {"text-classification": folder / "model"}


EMBEDS, READS, ORDERS, ANSWERS = "feature-extraction", "text-generation", "text-classification", "question-answering"
CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
ALPACA = "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
WITHOUT_INPUT = ALPACA.replace("### Input:\n{input}\n\n", "")
ANSWER = {"text": ["b"], "answer_start": [0]}
LABELLED = {"document": "document", "label": "label"}
# A task, the columns of a row, and which of them are read, as what.
USUAL: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    (EMBEDS, {"query": "a", "passage": "b", "score": 1}, {"query": "query", "document": "passage", "label": "score"}),
    (EMBEDS, {"query": "a", "document": ["b"], "id": "c"}, {"query": "query", "document": "document"}),
    (EMBEDS, {"query": "a", "document": ["b"], "label": [1.0]}, {"query": "query"} | LABELLED),
    (EMBEDS, {"sentence1": "a", "sentence2": "b", "score": 0.5, "id": "c"}, {"text": PAIR, "label": "score"}),
    (EMBEDS, {"one": "a", "two": "b", "score": 0.5}, {"text": ("one", "two"), "label": "score"}),
    (EMBEDS, {"text": "a", "title": "b", "label": 1}, {"text": ("text",)}),
    (EMBEDS, {"words": "a", "id": 1}, {"text": ("words",)}),
    (
        ORDERS,
        {"query": "a", "passage": "b", "label": 1},
        {"text": ("query", "passage"), "label": "label", "group": "query"},
    ),
    (ORDERS, {"query": "a", "document": "b", "query_id": 7}, {"text": ("query", "document"), "group": "query_id"}),
    (ORDERS, {"sentence1": "a", "sentence2": "b", "group": 7, "query_id": 1}, {"text": PAIR, "group": "group"}),
    (ORDERS, {"sentence1": "a", "sentence2": "b", "label": 0.5}, {"text": PAIR, "label": "label"}),
    (READS, {"messages": CHAT, "text": "a"}, {"messages": ("messages",)}),
    (READS, {"chat": CHAT, "source": "a", "id": "b"}, {"messages": ("chat",)}),
    (READS, {"prompt": CHAT[:1], "completion": CHAT[1:]}, {"messages": ("prompt", "completion")}),
    (READS, {"prompt": "a", "completion": "b", "id": "c"}, {"messages": ("prompt", "completion")}),
    (READS, {"instruction": "a", "input": "b", "output": "c"}, {"prompt": ALPACA, "answer": "output"}),
    (READS, {"instruction": "a", "output": "c"}, {"prompt": WITHOUT_INPUT, "answer": "output"}),
    (
        ANSWERS,
        {"question": "a", "context": "b", "answers": ANSWER},
        {"text": ("question", "context"), "label": "answers"},
    ),
]


@pytest.mark.parametrize(("task", "row", "columns"), USUAL)
def test_usual_columns_are_known_by_their_names(
    task: str, row: dict[str, Any], columns: dict[str, Any], models: dict[str, Path], tmp_path: Path
) -> None:
    recipe = proposed(models[task], tmp_path / "rows.jsonl", row)
    assert (recipe.task, columns_of(recipe)) == (task, columns)
    if task == ORDERS:
        assert proposed(models["classes"], tmp_path / "rows.jsonl", row).data.group is None


def test_two_texts_without_a_number_leave_a_choice(models: dict[str, Path], tmp_path: Path) -> None:
    with pytest.raises(DataError, match="needs to know which columns to read"):
        proposed(models[EMBEDS], tmp_path / "rows.jsonl", {"one": "a", "two": "b"})


def test_ids_of_a_model_and_of_a_data_set_are_enough(
    folder: Path, tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the real clients."""
    where = {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": False, "HF_DATASETS_CACHE": tmp_path / "datasets"}
    for name, value in where.items():
        monkeypatch.setattr(datasets.config, name, value)
    for name, place in {"user/model": folder / "model", "datasets/user/rows": folder}.items():
        files = [file for file in place.iterdir() if place.name == "model" or file.suffix == ".jsonl"]
        hub.add(name, {file.name: file.read_bytes() for file in files})
    asked = ["deploy", "user/model", "--data", "user/rows", "--keep", "0.5", "--runtime", "onnxruntime-cpu"]
    monkeypatch.setattr(fastest._Search, "run", lambda *_, **__: None)  # what is searched for is found in other tests
    assert hies(*asked, "-o", tmp_path / "out", "--json") == 0
    said = capsys.readouterr()
    # Nothing that was not asked for is missed.
    assert [line for line in said.err.splitlines() if "warning" in line] == []
    assert json.loads(said.out.splitlines()[-1])["model"] == "user/model"
    report = Report.from_file(tmp_path / "out")
    data, deployment = report.details.data, report.details.deployment
    assert (data.name, data.held_out_split) == ("user/rows", "validation")
    assert deployment is not None
    assert (tmp_path / "out" / str(deployment.file)).is_file()


def test_several_processes_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RequestError, match="deploy runs in one process, and the launcher started 2; start it without"):
        deploy(PruningRecipe.from_yaml(folder / "recipe.yaml"))


def test_recipes_that_cannot_be_deployed_are_refused(folder: Path) -> None:
    images: dict[str, Any] = {"task": "image-text-to-text", "data.text": [], "data.image": "image", "data.label": None}
    images |= {"data.prompt": "?", "data.answer": "answer"}
    for changes, said in (
        (images, "deploy compares models that are one graph, got task: image-text-to-text"),
        ({"export.dtype": "float16"}, "deploy exports what each runtime reads, got export: onnx, cpu, float16"),
    ):
        with pytest.raises(RequestError, match=said):
            deploy(PruningRecipe.from_yaml(folder / "recipe.yaml", changes))


def test_what_leaves_a_choice_is_refused(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows, other = tmp_path / "rows.jsonl", tmp_path / "bare"
    asked = {"one": "a", "two": "b", "three": "c"}
    with pytest.raises(DataError, match=r"columns to read .* the data set has one, two, three; name them with"):
        proposed(folder / "model", rows, asked)
    BertForNextSentencePrediction.from_pretrained(folder / "model").save_pretrained(other)
    with pytest.raises(RequestError, match=r"of a class that AutoModelFor.* names BertForNextSentencePrediction"):
        proposed(other, rows, asked)
    config = json.loads((other / "config.json").read_text())
    remote = {"architectures": ["JinaBertModel"], "auto_map": {"AutoModel": "modeling_bert.JinaBertModel"}}
    (other / "config.json").write_text(json.dumps(config | remote))
    with pytest.raises(RequestError, match=r"names JinaBertModel; it needs code of its own \(auto_map\)"):
        proposed(other, rows, asked)
    for data, said in (
        (["imdb", "train=x.jsonl"], "--data takes one Hub data set, or SPLIT=FILE once or more"),
        ([folder / "recipe.yaml"], f"must name the split of a file or an image folder, got {folder}"),
    ):
        assert hies("deploy", folder / "model", *(part for one in data for part in ("--data", one))) == 2
        assert said in capsys.readouterr().err
