"""What renderings say of a slim model that was written as another stock family."""

import io

from rich.console import Console
from support.reports import make_report

from hies_export.report.card import render_card
from hies_export.report.html import render_html
from hies_export.report.jinja import render_markdown
from hies_export.report.terminal import print_report

NOTE = "Written as mistral, which computes the same: a config of llama does not take this number of heads."


def terminal(report):
    stream = io.StringIO()
    print_report(report, Console(file=stream, width=200))
    return stream.getvalue()


def test_every_rendering_says_it_where_it_is_so_and_only_there():
    for family, times in ((("llama", "mistral"), 1), (("llama", "llama"), 0), (None, 0)):
        said = {"family": dict(zip(("dense", "slim"), family, strict=True))} if family else {}
        report = make_report(**said)
        for render in (render_card, render_html, render_markdown, terminal):
            assert render(report).count(NOTE) == times, render
    assert f"with no extra code. {NOTE}\n\n## What it costs" in render_card(
        make_report(family={"dense": "llama", "slim": "mistral"})
    )
