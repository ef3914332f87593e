"""The page answers its own requests, and none that another site makes the browser send."""

import asyncio
import gc
import urllib.error
import urllib.request
from typing import Any

import pytest

from hies_export.lab.ui.guard import Guard

OWN = [
    {"host": "127.0.0.1:7860"},
    {"host": "localhost:7860", "origin": "http://localhost:7860"},
    {"Host": "LOCALHOST:9999", "Origin": "http://localhost:9999"},  # through a tunnel
    {"host": "[::1]:7860", "origin": "http://[::1]:7860"},
]
OTHERS = [
    {},
    {"host": "evil.example:7860"},  # a name that its owner lets point here
    {"host": "evil.example:7860", "origin": "http://evil.example:7860"},
    {"host": "127.0.0.1.evil.example"},
    {"host": "127.0.0.1:7860", "origin": "https://evil.example"},
    {"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:8000"},  # another server of this machine
    {"host": "127.0.0.1:7860", "origin": "http://127.0.0.1:7860.evil.example"},
    {"host": "127.0.0.1:7860", "origin": "null"},
    {"host": "evil.example@127.0.0.1:7860"},
    {"host": "[::1"},
    {"host": "127.0.0.1:7860", "Host": "evil.example"},  # two
]


def answer(headers: dict[str, str], kind: str = "http") -> list[dict[str, Any]]:
    """Return what is sent in answer to a request with these headers."""
    sent: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "the app"})

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        raise AssertionError("nothing is read of a request before it is let in")

    raw = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    asyncio.run(Guard(app)({"type": kind, "headers": raw}, receive, send))
    return sent


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize("headers", OWN)
def test_own_requests_are_let_in(headers: dict[str, str], kind: str) -> None:
    assert answer(headers, kind) == [{"type": "the app"}]


@pytest.mark.parametrize("headers", OTHERS)
def test_others_are_refused(headers: dict[str, str]) -> None:
    start, body = answer(headers)
    assert (start["type"], start["status"]) == ("http.response.start", 403)
    assert b"answers only its own page" in body["body"]
    assert answer(headers, "websocket") == [{"type": "websocket.close", "code": 1008}]


def test_what_is_no_request_is_passed_on() -> None:
    assert answer({}, "lifespan") == [{"type": "the app"}]


# Gradio leaves sockets and event loops open, which Python notices when it collects them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_the_page_is_guarded() -> None:
    """Gradio's own server, asked as a browser does on behalf of the page and of other sites."""
    gradio = pytest.importorskip("gradio", reason="no Gradio here: pip install gradio")
    from hies_export.lab.ui.app import serve

    with gradio.Blocks(analytics_enabled=False) as page:
        gradio.Markdown("the page")
    serve(page)
    try:

        def status(**headers: str) -> int:
            request = urllib.request.Request(page.local_url + "config", headers=headers)
            try:
                with urllib.request.urlopen(request, timeout=300) as response:
                    return response.status
            except urllib.error.HTTPError as error:
                return error.code

        own = page.local_url.rstrip("/")
        assert (status(), status(Origin=own)) == (200, 200)
        assert status(Host="evil.example") == status(Origin="http://evil.example") == 403
    finally:
        page.close()
        gc.collect()
