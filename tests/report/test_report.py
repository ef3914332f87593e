"""report.json: written, read, and read by its keys as by its fields."""

import json
from pathlib import Path

import pytest
from support.reports import make_report

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
    assert report.quality["slim"] == report.quality.slim == 0.89
    assert {**report.flops} == {"dense": 10**9, "slim": 8 * 10**8, "shape": (8, 128)}
    assert [row["runtime"] for row in report.latency] == [row.runtime for row in report.latency]
    with pytest.raises(KeyError, match="dens"):
        report.quality["dens"]
