"""`optimum-cli hies ...`: the same program under Optimum's command line."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from optimum.commands import optimum_cli

from hies_export import Kept, PruningPlan
from hies_export.cli import main as cli


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a command line under Optimum or by itself: exit code, standard output, standard error."""

    def run(*command: object) -> tuple[int | None, str, str]:
        program, *arguments = map(str, command)
        try:
            if program == "optimum-cli":
                monkeypatch.setattr(sys, "argv", [program, *arguments])
                optimum_cli.main()
                code = None
            else:
                code = cli.main(arguments)
        except SystemExit as exited:
            code = exited.code
        return code, *capsys.readouterr()

    return run


def test_a_command_gives_the_same_result_either_way(both, tmp_path: Path) -> None:
    plan = PruningPlan("hies", kept={"layer.0": Kept((0, 2), 3)})
    (tmp_path / "plan.json").write_text(plan.to_json())
    asked = ("inspect", tmp_path / "plan.json", "--json")
    code, out, err = both("hies-export", *asked)
    assert (code, json.loads(out.splitlines()[-1])["heads"]) == (0, {"total": 3, "removed": 1})
    assert both("optimum-cli", "hies", *asked) == (code, out, err)


def test_wrong_requests_have_the_same_words_and_codes(both, tmp_path: Path) -> None:
    for arguments in (("run", "none.yaml"), ("report", tmp_path), ("run",), ("unheard-of",)):
        code, _, err = both("hies-export", *arguments)
        under_optimum, _, said = both("optimum-cli", "hies", *arguments)
        assert code == under_optimum == 2
        assert said.splitlines()[-1].replace("optimum-cli hies", "hies-export") == err.splitlines()[-1]


def test_help_names_the_program_that_was_typed(both) -> None:
    code, out, _ = both("optimum-cli", "hies", "--help")
    assert code == 0
    assert out.replace("optimum-cli hies", "hies-export").split() == both("hies-export", "--help")[1].split()
    assert "\n    hies " in both("optimum-cli", "--help")[1]


def test_registering_imports_nothing_heavy() -> None:
    code = "import sys, optimum.commands.register.register_hies; print(*sys.modules)"
    command = [sys.executable, "-c", code]
    modules = set(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    assert "optimum.commands.register.register_hies" in modules
    assert not modules & {"torch", "transformers", "numpy", "yaml", "rich", "hies_export"}
