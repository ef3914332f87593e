"""One self-contained HTML page: shell, tables and bars. Nothing is loaded from anywhere."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path

# The browser itself sees to it that nothing is loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def page(title: str, subtitle: str, sections: Sequence[tuple[str, str]], *, top: str = "", script: str = "") -> str:
    """A page of sections (name, HTML), with `top` (HTML) under its headline and a script at its end."""
    body = "".join(f"<section><h2>{name}</h2>{content}</section>" for name, content in sections)
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="color-scheme" content="light dark"><link rel="icon" href="data:,">'
        f"<title>{escape(title)}</title><style>{asset('report.css')}</style></head><body><main>"
        f"<header><h1>{escape(title)}</h1><p class=muted>{escape(subtitle)}</p>{top}</header>"
        f"{body}</main>{f'<script>{script}</script>' if script else ''}</body></html>\n"
    )


def bar(name: str, share: float, text: str, kind: str) -> str:
    """A horizontal bar of a share in [0, 1]."""
    width = 100 * min(max(share, 0.0), 1.0)
    return (
        f"<div class=bar><div class=name>{escape(name)}<b>{escape(text)}</b></div>"
        f"<div class=track><i class={kind} style='width:{width:.2f}%'></i></div></div>"
    )


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that scrolls where it is too wide."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if any(header) else ""
    return f"<div class=scroll><table>{top}<tbody>{lines}</tbody></table></div>"


def folded(summary: str, content: str, *, wrap: bool = False) -> str:
    """Content that opens on a click."""
    return f"<details{' class=wrap' if wrap else ''}><summary>{escape(summary)}</summary>{content}</details>"


def asset(name: str) -> str:
    """The text of a file beside this one."""
    return Path(__file__).with_name(name).read_text(encoding="utf-8")
