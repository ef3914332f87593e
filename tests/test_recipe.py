from pathlib import Path

import pytest
import yaml
from support.loading import load_pruning
from support.models import save_project, write_rows

from hies_export.errors import RecipeError
from hies_export.pipeline.recipe import PruningRecipe

RECIPES = sorted((Path(__file__).parents[1] / "recipes").rglob("*.yaml"))

GOOD = {
    "model": "some/model",
    "task": "text-classification",
    "data": {"name": "nyu-mll/glue/sst2", "text": "sentence", "label": "label"},
    "prune": {"budget": {"heads": 0.3}},
}
OPENVINO = {"format": "openvino", "quantize": "int8"}
DECODER = {"task": "text-generation", "data": {"files": {"train": "a.jsonl"}, "text": "text"}}
TRIMMED: dict[str, object] = {"vocabulary": {}}


def changed(dotted: str, value: object) -> dict[str, object]:
    fields = yaml.safe_load(yaml.safe_dump(GOOD))
    *sections, last = dotted.split(".")
    place = fields
    for section in sections:
        place = place.setdefault(section, {})
    place[last] = value
    return fields


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_is_valid(path: Path) -> None:
    assert PruningRecipe.from_yaml(path).evaluation.split
    assert path.read_text().startswith("# ")
    fields = yaml.safe_load(path.read_text())
    assert fields["output"] not in [fields["model"], *map(str, Path(fields["model"]).parents)]  # is not what it reads


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("prun", {}, "prun is not a field of the recipe; did you mean 'prune'"),
        ("data.zzz", 1, "data.zzz is not a field of the recipe; leave it out"),
        ("prune.budget.heads", 1.2, "prune.budget.heads must be less than 1, got 1.2"),
        ("prune.budget", {}, "exactly one of heads, flops, parameters, latency, keep must be given"),
        ("prune.alpha", 1.0, r"prune.alpha: alpha must be auto or a number in \[0, 1\), got 1.0;"),
        ("prune.alpha", float("nan"), r"in \[0, 1\), got nan"),
        ("prune.compensation", {"method": "magic"}, "compensation.method must be 'bias' or 'least_squares'"),
        ("prune.compensation", {"sample": 5}, "prune.compensation.sample is not a field .* did you mean 'samples'"),
        ("prune.criterion", "hiess", "criterion must be one of hies, .* got 'hiess'; did you mean 'hies'"),
        ("prune.budget", {"flops": 0.5, "parameters": 0.5}, "must be given, got flops and parameters"),
        ("prune.modules", [], r"prune.modules: modules must be among attention and mlp, each once, got \[\]"),
        ("prune.modules", ["mlp", "mlp"], r"must be among attention and mlp, each once, got \['mlp', 'mlp'\]"),
        ("prune.modules", ["mlp"], r"budget.heads is for modules: \[attention\], got modules: \[mlp\]; set budget"),
        ("prune.multiple_of", {"heads": 0}, "prune.multiple_of.heads must be greater than or equal to 1, got 0"),
        ("prune.compensation", {"token_weights": 0.3, "sequential": True}, "alike, got token_weights: 0.3; leave out"),
        ("prune.allocation", {"heads": "uniform"}, "one for each of attention and mlp, .* got {'heads': 'uniform'}"),
        ("prune.allocation", [1], r"allocation must be global or uniform, .* got \[1\]"),
        ("task", "summarization", "task: task must be one of text-classification, .*, got 'summ"),
        ("data.label", ["a", "b"], r"data.label must be .* string, got \['a', 'b'\]"),
        ("data.files", {"train": "a"}, r"data: exactly one of name \(a Hub data set\) and files must be .* got both"),
        ("data.text", ["a", "b", "c"], r"needs data.text \(one or two columns\)"),
        ("measure.runtimes", ["torsh"], "a runtime must be one of torch, .*, got 'torsh'; did you mean 'torch'"),
        ("measure.shapes", [[1, 2, 3]], "measure.shapes.0 must be .* at most 2 items"),
        ("prune.budget", {"latency": {"ratio": 1.1}}, "latency.ratio.*less than 1"),
        ("prune.budget", {"latency": {"ratio": 0.9, "runtime": "torsh"}}, "got 'torsh'; did you mean 'torch'"),
        ("prune.budget", {"keep": {"metric": "accurcy", "by": 0.01}}, "got 'accurcy'; did you mean 'accuracy'"),
        ("prune.budget", {"keep": {"metric": "accuracy", "by": -0.01}}, "keep.by.*greater than or equal to 0"),
        ("export", {"dtype": "q8_0"}, "dtype must be float32 or float16 for format: onnx, got q8_0; set format: gg"),
        ("export", {"format": "gguf", "provider": "cuda"}, "provider belongs to format: onnx, got cuda"),
        ("export", {"format": "gguf"}, "gguf is for text-generation, got task: text-classification"),
        ("export", OPENVINO | {"quantize": None}, "needs quantize: int8, got None; set it, or set format: onnx"),
        ("export", OPENVINO | {"quantize": "int4"}, "format: openvino needs quantize: int8, got int4"),
        ("export", OPENVINO | {"provider": "cuda"}, "needs provider: cpu and dtype: float32, got cuda"),
        ("vocabulary", {"words": 3}, "vocabulary.words is not a field of the recipe"),
    ],
)
def test_what_is_wrong_is_said(field: str, value: object, message: str) -> None:
    with pytest.raises(RecipeError, match=message) as error:
        PruningRecipe(**changed(field, value))
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"export": OPENVINO} | DECODER, "export.format openvino is for encoders, got task: text-generation"),
        ({"cascade": {"disagreement": 0.1}, "prune": {}} | TRIMMED, "a cascade promises the answers of a dense model"),
        (
            {"task": "image-classification", "data": {"name": "a", "image": "i"}} | TRIMMED,
            "vocabulary is for models that read",
        ),
    ],
)
def test_sections_that_do_not_fit_each_other(sections: dict[str, object], message: str) -> None:
    with pytest.raises(RecipeError, match=message):
        PruningRecipe(**(GOOD | sections))


def test_a_gguf_file_has_dtypes_of_its_own() -> None:
    assert PruningRecipe(**(GOOD | DECODER | {"export": {"format": "gguf", "dtype": "q8_0"}})).export.dtype == "q8_0"


def test_all_problems_at_once() -> None:
    fields = changed("prune.alpha", 2) | {"modell": "x", "task": "chess"}
    with pytest.raises(RecipeError, match=r"(?s)3 problems:.*- modell is not .*'model'") as error:
        PruningRecipe(**fields)
    assert len(error.value.problems) == 3


def test_modules_have_one_order() -> None:
    fields = changed("prune.budget", {"flops": 0.6})
    fields["prune"] |= {"modules": ["mlp", "attention"]}  # type: ignore[operator]
    assert PruningRecipe(**fields).prune.modules == ("attention", "mlp")


def write(folder: Path, fields: object) -> Path:
    path = folder / "recipe.yaml"
    path.write_text(fields if isinstance(fields, str) else yaml.safe_dump(fields))
    return path


def test_paths_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "local").mkdir()
    fields = GOOD | {"model": "local", "output": "runs/x", "data": {"files": {"train": "a.csv"}, "text": "t"}}
    recipe = PruningRecipe.from_yaml(write(tmp_path, fields))
    assert recipe.model == str(tmp_path / "local")
    assert recipe.output == tmp_path / "runs" / "x"
    assert recipe.data.files == {"train": tmp_path / "a.csv"}
    assert PruningRecipe.from_yaml(write(tmp_path, GOOD)).model == "some/model"


def test_paths_may_begin_in_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = tmp_path / "home"
    (home / "local").mkdir(parents=True)
    monkeypatch.setenv("HOME", str(home))
    fields = {"model": "~/local", "output": "~/x", "data": {"files": {"train": "~/a.csv"}, "text": "t"}}
    recipe = PruningRecipe.from_yaml(write(tmp_path, GOOD | fields | {"vocabulary": {"files": ["~/b.txt"]}}))
    assert (recipe.model, recipe.output) == (str(home / "local"), home / "x")
    assert recipe.inputs["data.files.train"] == home / "a.csv"
    assert recipe.inputs["vocabulary.files.0"] == home / "b.txt"


def test_overrides(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD)
    recipe = PruningRecipe.from_yaml(path, {"prune.budget.heads": 0.5, "evaluation.samples": 7, "output": Path("here")})
    assert (recipe.prune.budget.heads, recipe.evaluation.samples, recipe.output) == (0.5, 7, Path("here"))
    with pytest.raises(RecipeError, match="model.x cannot be set: model is a plain value"):
        PruningRecipe.from_yaml(path, {"model.x": 1})
    with pytest.raises(RecipeError, match="did you mean 'alpha'"):
        PruningRecipe.from_yaml(path, {"prune.alpa": 1})


def test_files_that_are_no_recipe(tmp_path: Path) -> None:
    for text, held in (("- 1", "list"), ("", "NoneType")):
        with pytest.raises(RecipeError, match=f"must be a mapping of fields, but .* holds {held}"):
            PruningRecipe.from_yaml(write(tmp_path, text))


def test_rows_of_one_class_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_project(tmp_path, train=20, validation=4, calibration={"samples": 6}, prune={"budget": {"heads": 0.5}})
    load_pruning(PruningRecipe.from_yaml(tmp_path / "recipe.yaml"))
    assert "calibration rows" not in caplog.text
    write_rows(tmp_path / "train.jsonl", 20, label=lambda i: 1)
    load_pruning(PruningRecipe.from_yaml(tmp_path / "recipe.yaml"))
    assert "all 6 calibration rows are of class 1, so heads are scored by that class alone" in caplog.text
    write_rows(tmp_path / "validation.jsonl", 4, label=lambda i: 0)
    load_pruning(PruningRecipe.from_yaml(tmp_path / "recipe.yaml"))
    assert "all 4 evaluated rows are of class 0, so both models are judged by that class alone; give" in caplog.text
