"""report.json, read by its keys as by its fields, and what a report takes from the dense model's card."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.reports import make_report

from hies_export.checkpoint.beside import read_card
from hies_export.report.report import Report


def test_a_report_is_what_its_file_says(tmp_path: Path) -> None:
    report = make_report()
    (tmp_path / "report.json").write_text(report.to_json())
    assert Report.from_file(tmp_path) == Report.from_file(tmp_path / "report.json") == report
    values = json.loads(report.to_json())
    del values["details"]
    assert report.summary() == values | {"flops": {**values["flops"], "shape": (8, 128)}}


def test_fields_answer_to_the_keys_of_the_file() -> None:
    report = make_report()
    assert report.parameters == {"dense": 1000, "slim": 800}
    assert list(report.parameters) == ["dense", "slim"]
    assert report.quality["slim"] == report.quality.slim == 0.89
    assert {**report.flops} == {"dense": 10**9, "slim": 8 * 10**8, "shape": (8, 128)}
    assert [row["runtime"] for row in report.latency] == [row.runtime for row in report.latency]
    with pytest.raises(KeyError, match="dens"):
        report.quality["dens"]


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
