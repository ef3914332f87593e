"""Draw agreement against time of a run and of other tools, and print the same as a table.

python bench/frontier.py RUN/report.json [peers.json] OUT.svg

peers.json, as bench/other_tools.py writes it, is a list of what other tools made of the same model: name, bits, bytes,
stability and its lower end `low`, quality, and `times` at shapes, relative to dense float32 (ratio, low, high, noisy).
Of each tool the row that keeps most answers is drawn, if it is faster than the dense model by 3 %. Left out are
our own forms, what has a problem, and what was too noisy at the shape that decides.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from hies_export.forms.time import TimedRow, deciding_step, relative_times
from hies_export.report.comparison import Bench, read_report
from hies_export.report.drawing import SECOND
from hies_export.report.frontier import Measured, draw_frontier, frontier_figure
from hies_export.report.words import form_name, form_step
from hies_export.units.counts import si

REPORT, *PEERS, OUT = sys.argv[1:]
OURS = ("dense", "slim")
FASTER = 0.97


def tool_of(values: dict[str, Any]) -> str:
    """Return the name of a tool, without the way it was used in."""
    return str(re.split(r",|'s | quantize| with | of | \d{4}", values["name"])[0])


def peer(values: dict[str, Any], at: TimedRow) -> Measured | None:
    """Return what another tool made, at the shape of a time; None where that is not known."""
    times = [
        t for t in values["times"] or () if (t["batch"], t["sequence"]) == (at.batch, at.sequence) and not t["noisy"]
    ]
    if values["problem"] or not times or times[0]["ratio"] > FASTER or tool_of(values) in OURS:
        return None
    same, time = values["stability"], times[0]
    return Measured(
        name=f"{tool_of(values)} {values['bits']}",
        time=time["ratio"],
        same=same,
        time_ends=(time["low"], time["high"]),
        same_ends=(values["low"], values.get("high", same)),
        colour=SECOND,
    )


report = read_report(REPORT)
assert not isinstance(report, Bench), "give the report of a run"
forms = report.details.forms
step = deciding_step(forms[0].times) if forms else None
assert step is not None, "all times are too noisy"
at = forms[0].times[step]
tools = json.loads(Path(PEERS[0]).read_text()) if PEERS else []
tools.sort(key=lambda values: -(values["stability"] or 0.0))
found = {tool_of(values): (one, values["bytes"]) for values in reversed(tools) if (one := peer(values, at)) is not None}
others = [*found.values()]
figure = frontier_figure(report, [one for one, _ in others])
assert figure is not None
Path(OUT).write_text(draw_frontier(figure))

timed = [form for form in forms if step < len(form.times)]
lines = [
    (form_name(form, forms), form.bytes, form.stability, time)
    for form, time in zip(timed, relative_times([form.times for form in timed], step), strict=True)
]
lines += [(one.name, size, one.same, one.time) for one, size in others]
print(f"| | file | answers kept | time, {form_step(at)} |\n| --- | --- | --- | --- |")
for name, size, same, time in sorted(lines, key=lambda line: line[-1]):
    print(f"| {name} | {'' if size is None else si(size) + 'B'} | {100 * same:.1f} % | {time:.2f} |")
