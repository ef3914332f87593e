"""What tables say, and that on terminals of any width no cell is lost or cut short."""

import io
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.text import Text
from support.reports import DATA, make_report

from hies_export.report.tables import change, comparison_table, latency_table, plain_table

HEADER = ("", "file", "same prediction", "time 1 row (3.82 ms)", "time 8 rows (23.1 ms)")
ROWS = [
    ("dense float32, ONNX Runtime", "90.9 MB", "100.0%", "0.996 [0.988, 1.003]", "0.974 [0.933, 1.001]"),
    ("cascade int8, ONNX Runtime", "99.1 MB", "99.9%", "0.673 [0.645, 0.704]", "0.558 [0.525, 0.590]"),
]


def shown(what: Any, width: int, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=width, **options).print(what)
    return out.getvalue()


def printed(width: int) -> list[str]:
    return [line.rstrip() for line in shown(plain_table(HEADER, ROWS), width).splitlines()]


def test_a_row_is_a_line_where_it_fits_and_its_words_are_whole_where_it_is_folded() -> None:
    wide, narrow = printed(200), printed(70)
    assert len(wide) == 3
    assert max(map(len, narrow)) <= 70
    for cell in (*HEADER, *(cell for row in ROWS for cell in row)):
        assert cell in "\n".join(wide)
        assert all(word in "\n".join(narrow) for word in cell.split())


def test_brackets_are_text_and_marks_stay() -> None:
    table = plain_table(("", "a"), [("[bold]", Text.from_markup("[bold]1[/bold]"))])
    text = shown(table, 80, force_terminal=True, color_system="standard")
    assert "[bold]" in text
    assert "\x1b[1m1" in text


def test_both_models_stand_beside_each_other() -> None:
    table = comparison_table(make_report())
    rows = {row[0]: tuple(row[1:]) for row in table.rows}
    assert list(table.header) == ["", "dense", "slim", "change"]
    assert rows["checkpoint weights"] == ("4.00 kB", "3.20 kB", "-20.0%")
    assert [change(8, slim) for slim in (8, 7, 9)] == ["0.0%", "-12.5%", "+12.5%"]
    assert rows["accuracy"] == ("0.9000", "0.8900", "-0.0100")
    assert rows["same prediction"] == ("", "97.0%", "")
    plain = comparison_table(make_report(data=DATA | {"evaluation_labelled": False}))
    assert not {"accuracy", "F1"} & {row[0] for row in plain.rows}


def test_times_without_some_numbers_have_no_columns_for_them() -> None:
    row = make_report().latency[0]
    whole, plain = latency_table([row]), latency_table([replace(row, dense_p90_ms=None, realised=None)])
    assert dict(zip(whole.header, whole.rows[0], strict=True))["p90, ms"] == "110 → 91.3"
    assert set(whole.header) - set(plain.header) == {"p90, ms", "realised"}
