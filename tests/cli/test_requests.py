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


def test_a_budget_may_be_any_field(project: Path) -> None:
    arguments = ("run", project / "model", *data_of(project), "--set", "prune.budget.parameters=0.7")
    recipe, _ = asked(*arguments, "--set", "prune.criterion=fisher")
    assert (recipe.goal.parameters, recipe.options.criterion) == (0.7, "fisher")


def test_a_budget_replaces_that_of_a_recipe(project: Path) -> None:
    recipe, printed = asked("run", project / "recipe.yaml", "--keep", 0.9)
    assert recipe.goal.keep is not None
    assert (recipe.goal.keep.predictions, recipe.goal.heads, printed) == (0.9, None, "")


def test_a_deployment_needs_no_budget(project: Path) -> None:
    recipe, _ = asked("deploy", project / "model", *data_of(project), "--keep", 0.9)
    assert recipe.deploy is not None
    assert recipe.prune.budget is None


@pytest.mark.parametrize(
    ("change", "sections"),
    [
        ("vocabulary={}", {"vocabulary"}),
        ("vocabulary.min_count=2", {"vocabulary"}),
        ("cascade.disagreement=0.01", {"cascade"}),
    ],
)
def test_a_section_may_take_the_place_of_a_budget(change: str, sections: set[str], project: Path) -> None:
    arguments = ("run", project / "model", *data_of(project), "--set", change)
    recipe, _ = asked(*arguments)
    assert {name for name in ("vocabulary", "cascade", "deploy") if getattr(recipe, name) is not None} == sections
    assert recipe.prune.budget is None
    both, _ = asked(*arguments, "--flops", 0.6)
    assert (both.goal.flops, both.vocabulary, both.cascade) == (0.6, recipe.vocabulary, recipe.cascade)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["{project}/model", "--flops", "0.6"], "a model needs --data"),
        (["{project}/model", "--data=train={project}/train.jsonl"], "--flops 0.6, --keep 0.99 or --heads 0.3"),
        (["{project}/recipe.yaml", "--label", "label"], "about a MODEL"),
        (["no.yaml", "--flops", "0.6"], "there is no file no.yaml"),
        (["{project}/model", "--data=train=a", "--data=train=b", "--flops", "0.6"], "each split once"),
        (["{project}/model", "--data=train=", "--flops", "0.6"], "SPLIT=FILE"),
    ],
)
def test_what_is_missing_is_said(arguments: list[str], problem: str, project: Path) -> None:
    with pytest.raises(HiesError, match=problem):
        asked("run", *(argument.format(project=project) for argument in arguments))


def test_a_deployment_takes_no_budget(project: Path) -> None:
    with pytest.raises(HiesError, match="got prune.budget.keep; give --keep SHARE"):
        asked("deploy", project / "recipe.yaml", "--set", "prune.budget.keep=0.9")


def test_a_wrong_recipe_is_refused_before_torch_is_imported() -> None:
    program = (
        "import sys; from hies_export.cli.main import main; code = main(sys.argv[1:]); "
        "print(code, *sorted({'torch', 'transformers', 'datasets'} & {*sys.modules}))"
    )
    recipe = Path(__file__).parents[2] / "recipes" / "bert-sst2.yaml"
    for change in ("foo=1", "prune.criterion=none", "measure.runtimes=[none]", "export.format=none"):
        command = [sys.executable, "-c", program, "run", str(recipe), "--set", change]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "2\n"
