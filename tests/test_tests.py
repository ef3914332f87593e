"""What holds of every test file: what it imports, which errors it expects."""

import ast
from pathlib import Path

TESTS = Path(__file__).parent
MODULES = sorted(TESTS.rglob("*.py"))


def imported(path: Path) -> set[str]:
    """The modules a file imports, wherever in it."""
    nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    parts = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    return names | {f"{'.' * part.level}{part.module or ''}.{alias.name}" for part in parts for alias in part.names}


def test_no_test_imports_another() -> None:
    tests = {path.stem for path in MODULES if path.stem.startswith("test_")} | {"conftest", "tests"}
    for path in MODULES:
        found = {name for name in imported(path) if name.startswith(".") or tests & set(name.split("."))}
        assert not found, f"{path.relative_to(TESTS)} imports {found}; what tests share is in tests/support"


def test_every_expected_error_says_which() -> None:
    # ruff's PT011 sees no error that is an expression or one of several.
    for path in MODULES:
        calls = [node for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(node, ast.Call)]
        for call in calls:
            if ast.unparse(call.func) in ("pytest.raises", "pytest.warns"):
                assert "match" in {k.arg for k in call.keywords}, f"{path.relative_to(TESTS)}:{call.lineno}"
