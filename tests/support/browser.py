"""Drive a headless Chromium."""

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


class Browser:
    """A headless Chromium, talked to by the DevTools protocol over a pipe."""

    _session: str | None = None

    def __init__(self, program: str, profile: Path):
        ours, theirs = os.pipe(), os.pipe()
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--hide-scrollbars"),
            *("--disable-component-update", "--remote-debugging-pipe", f"--user-data-dir={profile}"),
        ]
        # The browser reads commands from descriptor 3 and answers on 4.
        start = "import os, sys; r, w, *command = sys.argv[1:]; os.dup2(int(r), 3); os.dup2(int(w), 4)"
        start += "; os.execvp(command[0], command)"
        descriptors = [str(ours[0]), str(theirs[1])]
        profile.mkdir()
        self._profile = profile
        with (profile / "log").open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", start, *descriptors, program, *options],
                pass_fds=(ours[0], theirs[1]),
                stderr=log,
            )
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read = os.fdopen(ours[1], "wb"), os.fdopen(theirs[0], "rb")
        self._buffer, self._numbers, self.events = b"", itertools.count(1), []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **parameters: Any) -> dict[str, Any]:
        number = next(self._numbers)
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        self._write.write(json.dumps(message).encode() + b"\0")
        self._write.flush()
        while True:
            while b"\0" not in self._buffer:
                more = os.read(self._read.fileno(), 1 << 16)
                assert more, f"the browser is gone: {(self._profile / 'log').read_text()[-2000:]}"
                self._buffer += more
            text, _, self._buffer = self._buffer.partition(b"\0")
            answer = json.loads(text)
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return answer["result"]
            self.events.append(answer)

    def ask(self, script: str) -> Any:
        found = self("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 300) -> Any:
        end = time.monotonic() + seconds
        while not (found := self.ask(script)):
            assert time.monotonic() < end, (script, self.ask("document.body.innerText")[:2000])
            time.sleep(0.1)
        return found

    def show(self, address: str, *, width: int) -> None:
        """Open a page at a width, and forget what happened on the pages before it."""
        self.events.clear()
        self("Emulation.setDeviceMetricsOverride", width=width, height=2400, deviceScaleFactor=1, mobile=False)
        self("Page.navigate", url=address)
        self.wait("location.href != 'about:blank' && document.readyState == 'complete'")

    def look(self, folder: Path, page: str, script: str, *, width: int = 390, dark: bool = False) -> Any:
        """Show a page, and return what a script finds in it; fail on any message of the console."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self("Emulation.setEmulatedMedia", features=[scheme])
        (folder / "page.html").write_text(page)
        self.show((folder / "page.html").as_uri(), width=width)
        found = self.ask(script)
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        console = [event for event in self.events if event.get("method") in said]
        assert not console, console
        return found

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        self._write.close()
        self._read.close()
