"""Answer only this machine's own page.

A web site in the browser can send requests to a server on this machine. If it points its own host name here (DNS
rebinding), it could also read the answers. The headers Origin and Host reveal both.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

THIS_MACHINE = ("127.0.0.1", "localhost", "[::1]")
REFUSED = b"hies-export answers only its own page: open the address that it printed.\n"


class Guard:
    """Middleware that refuses a request whose Host is not this machine, or whose Origin is another page.

    Source: https://asgi.readthedocs.io/en/latest/specs/www.html
    """

    def __init__(self, app: App):
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it with 403."""
        if scope["type"] not in ("http", "websocket") or self._is_own(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})  # before it is accepted: 403
        else:
            plain = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": plain})
            await send({"type": "http.response.body", "body": REFUSED})

    def _is_own(self, scope: Message) -> bool:
        given = [(name.lower(), value.decode("latin-1").lower()) for name, value in scope["headers"]]
        hosts = [value for name, value in given if name == b"host"]
        origins = [value for name, value in given if name == b"origin"]
        if len(hosts) != 1 or re.sub(r":\d+$", "", hosts[0]) not in THIS_MACHINE:
            return False
        return all(origin in (f"http://{hosts[0]}", f"https://{hosts[0]}") for origin in origins)
