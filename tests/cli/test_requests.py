"""What `run`, `prune`, `score` and `deploy` are asked for: a recipe, or a model with its data and a budget."""

import io
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from support.models import save_project

from hies_export.cli.arguments import Options, read_recipe
from hies_export.cli.main import build_parser
from hies_export.errors import HiesError
from hies_export.pipeline.recipe import PruningRecipe, parse_yaml


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_project(tmp_path_factory.mktemp("project"), train=30, validation=20, prune={"budget": {"heads": 0.4}})


def asked(*arguments: object) -> tuple[PruningRecipe, str]:
    """Return the recipe of a command line, and what was printed."""
    options = build_parser().parse_args([str(argument) for argument in arguments], Options())
    options.console = Console(file=io.StringIO(), width=1000)
    recipe = read_recipe(options, deploys=arguments[0] == "deploy")
    return recipe, options.console.file.getvalue()  # type: ignore[attr-defined]


def data_of(project: Path) -> list[str]:
    return [f"--data={split}={project / split}.jsonl" for split in ("train", "validation")]


@pytest.mark.parametrize("command", ["run", "prune", "score"])
def test_a_model_with_data_and_a_budget_is_a_recipe(command: str, project: Path) -> None:
    recipe, printed = asked(command, project / "model", *data_of(project), "--flops", 0.6)
    assert (recipe.task, recipe.data.text, recipe.data.label) == ("text-classification", ("sentence",), "label")
    assert recipe.goal.flops == 0.6
    assert (recipe.options.modules, recipe.options.criterion) == (("attention", "mlp"), "compensated")
    assert (recipe.deploy, recipe.output) == (None, Path("runs") / command)
    assert PruningRecipe(**parse_yaml(printed, source="printed")).options == recipe.options


def test_heads_are_asked_for_as_in_the_paper(project: Path) -> None:
    recipe, _ = asked("run", project / "model", *data_of(project), "--heads", 0.25)
    assert (recipe.goal.heads, recipe.options.modules, recipe.options.criterion) == (0.25, ("attention",), "hies")
    assert recipe.options.compensation is None


def test_a_budget_may_be_any_field_and_replaces_that_of_a_recipe(project: Path) -> None:
    changes = ("--set", "prune.budget.parameters=0.7", "--set", "prune.criterion=fisher")
    recipe, _ = asked("run", project / "model", *data_of(project), *changes)
    assert (recipe.goal.parameters, recipe.options.criterion) == (0.7, "fisher")
    values = ("--set", "measure.shapes=[[1, 8]]", "--set", "prune.budget={heads: 0.25}", "-o", "elsewhere")
    recipe, _ = asked("run", project / "recipe.yaml", *values)
    assert (recipe.goal.heads, recipe.measure.shapes, recipe.output) == (0.25, ((1, 8),), Path("elsewhere"))
    recipe, printed = asked("run", project / "recipe.yaml", "--keep", 0.9)
    assert recipe.goal.keep is not None
    assert (recipe.goal.keep.predictions, recipe.goal.heads, printed) == (0.9, None, "")


def test_a_deployment_needs_no_budget_and_takes_none(project: Path) -> None:
    recipe, _ = asked("deploy", project / "model", *data_of(project), "--keep", 0.9)
    assert recipe.deploy is not None
    assert recipe.prune.budget is None
    with pytest.raises(HiesError, match="got prune.budget.keep; give --keep SHARE"):
        asked("deploy", project / "recipe.yaml", "--set", "prune.budget.keep=0.9")


def test_a_vocabulary_may_take_the_place_of_a_budget(project: Path) -> None:
    arguments = ("run", project / "model", *data_of(project), "--set", "vocabulary={}")
    recipe, _ = asked(*arguments)
    assert [name for name in ("vocabulary", "deploy") if getattr(recipe, name) is not None] == ["vocabulary"]
    assert recipe.prune.budget is None
    both, _ = asked(*arguments, "--flops", 0.6)
    assert (both.goal.flops, both.vocabulary) == (0.6, recipe.vocabulary)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{project}/model", "--flops", "0.6"], "a model needs --data"),
        (["{project}/model", "--data=train={project}/train.jsonl"], "--flops 0.6, --keep 0.99 or --heads 0.3"),
        (["{project}/recipe.yaml", "--text", "text"], "about a MODEL"),
        (["no.yaml", "--flops", "0.6"], "there is no file no.yaml"),
        (["{project}/model", "--data=train=a", "--data=train=b", "--flops", "0.6"], "each split once"),
        (["{project}/model", "--data=train=", "--flops", "0.6"], "SPLIT=FILE"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], problem: str, project: Path) -> None:
    with pytest.raises(HiesError, match=problem):
        asked("run", *(argument.format(project=project) for argument in arguments))


REFUSED = """\
run RECIPE --set foo=1
run RECIPE --set data.text=[]
run RECIPE --set prune.criterion=none
run RECIPE --set measure.runtimes=[none]
run RECIPE --set export.format=none
run RECIPE -o model
deploy RECIPE --runtime none
deploy RECIPE -o model
prune RECIPE -o model
score RECIPE -o model
export ./none -o out
export model -o model
export model -o out --format none
bench model ./none
bench model --runtime none
inspect ./none
inspect none.json
report none
push model a/b
apply none.json model -o out
apply plan.json ./none -o out
apply plan.json model -o model
quickstart -o model
generate ./none --prompt a
upgrade ./none -o out
upgrade model -o model
"""


def test_wrong_arguments_are_refused_before_torch_is_imported(tmp_path: Path) -> None:
    """Importing torch and transformers takes seconds; what a recipe or an argument says is judged before."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "plan.json").write_text("{}")
    recipe = Path(__file__).parents[2] / "recipes" / "bert-sst2.yaml"
    program = (
        "import sys; from hies_export.cli.main import main\nfor line in sys.stdin: "
        "print(main(line.split()), *sorted({'torch', 'transformers', 'datasets'} & {*sys.modules}), line, end='')"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=REFUSED.replace("RECIPE", str(recipe)),
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert done.stdout.replace(str(recipe), "RECIPE") == "".join(f"2 {line}\n" for line in REFUSED.splitlines())
