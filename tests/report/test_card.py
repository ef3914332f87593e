"""What a slim checkpoint's card takes from the card of its dense model."""

from pathlib import Path
from typing import Any

import pytest

from hies_export.checkpoint.beside import read_card

DEEP = "license: " + "[" * 1000
BOMB = "a: &a [x, x]\nb: &b [*a, *a]\nlicense: [*b, *b]\n"


@pytest.mark.parametrize(
    ("metadata", "found"),
    [
        ("license: mit\nbase_model: some/bert\ntags: [x]", {"license": "mit", "base_model": "some/bert"}),
        ("base_model:\n- some/bert\nlicense: 5", {"base_model": ["some/bert"]}),
        *((damaged, {}) for damaged in (DEEP, BOMB, "license: {a: b}\nlicense_name: [[x]]", "- a\n- b")),
        *((damaged, {}) for damaged in ("license: !!python/name:os.system", "license: mit\n  x: [")),
    ],
)
def test_only_texts_are_taken_from_a_card(metadata: str, found: dict[str, Any], tmp_path: Path) -> None:
    assert read_card(tmp_path) == {}
    (tmp_path / "README.md").write_text(f"---\n{metadata}\n---\n# A model\n")
    assert read_card(tmp_path) == found
