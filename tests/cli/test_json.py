"""`--json`: one line, last on standard output, whatever was printed before."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.models import save_deberta

from hies_export.cli.main import main


def test_the_result_is_the_last_line_and_only_when_asked_for(run_command: Callable[..., Any]) -> None:
    def run(console: Any, progress: Any) -> dict[str, Any]:
        progress.stage("load")
        console.print("a table")
        return {"heads": 3, "text": "two\nlines"}

    code, out, err = run_command(run, json=True)
    assert code == 0
    table, result = out.splitlines()
    assert table == "a table"
    assert json.loads(result) == {"heads": 3, "text": "two\nlines"}
    assert "load" in err
    assert run_command(run)[:2] == (0, "a table\n")


def test_a_file_gets_it_last_too(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as file:
        command = [sys.executable, "-m", "hies_export", "architectures", "bert", "--json"]
        subprocess.run(command, stdout=file, check=True)
    *table, result = (tmp_path / "out").read_text().splitlines()
    assert "model type" in table[0]
    assert list(json.loads(result)["types"]) == ["bert"]


def test_inspect_gives_the_reason_why_heads_cannot_be_cut(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_deberta(tmp_path)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    # Its neurons can be cut nevertheless.
    assert result["can_be_cut"] is True
    assert [block["neurons"] for block in result["mlp"]] == [16]
    assert "computes its own" in result["refused"]["attention"]
    assert f"heads cannot be cut: {result['refused']['attention']}" in lines
