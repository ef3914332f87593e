"""A small Hub on the loopback interface: what the real clients ask of it to push and read models and read data sets.

Run a client against it in a process of its own, with `Hub.environment()`: the client reads its settings on import.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import re
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

import yaml

TOKEN = "hf_nobodymayseethis"
RELATIONS = ("adapter", "finetune", "merge", "quantized")
LICENSES = ("apache-2.0", "mit", "llama3.2", "other")
LARGE = (".safetensors", ".onnx", ".onnx_data", ".png")


@dataclass
class Commit:
    """Hold the files of a repository at one point, as path -> content."""

    sha: str
    message: str
    files: dict[str, bytes]


@dataclass
class Repository:
    """Hold the commits of a repository by branch; the last commit of a branch is the one shown."""

    private: bool
    branches: dict[str, list[Commit]]

    def at(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((c for commits in self.branches.values() for c in commits if c.sha == revision), None)


@dataclass
class Hub:
    """The state of the Hub, and its server while it is used as a context.

    Attributes:
        tokens: Token -> user. A user may write to repositories under the own name.
        repositories: Id -> repository.
        blobs: SHA-256 -> content of a large file, whether it was committed or not.
        requests: What was asked, as "METHOD path".
        refuse: Paths that get this status while they are in here, once some other large file has come.
    """

    tokens: dict[str, str] = field(default_factory=dict)
    repositories: dict[str, Repository] = field(default_factory=dict)
    blobs: dict[str, bytes] = field(default_factory=dict)
    requests: list[str] = field(default_factory=list)
    refuse: dict[str, int] = field(default_factory=dict)

    def __enter__(self) -> Hub:
        hub = self

        class Handler(_Handler):
            state = hub

        self.lock, self.one_came = threading.Lock(), threading.Event()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        # Half a second between looks at whether to stop is what every test would wait for at its end.
        threading.Thread(target=self.server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def environment(self, home: Path, token: str | None = None) -> dict[str, str]:
        """Return the environment of a process that talks to this Hub only, with an empty cache of its own."""
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("HF_") and "proxy" not in k.lower()}
        given = {"HF_ENDPOINT": self.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(home)}
        # A busy machine may let a client wait for longer than its usual ten seconds.
        patient = dict.fromkeys(("HF_HUB_ETAG_TIMEOUT", "HF_HUB_DOWNLOAD_TIMEOUT"), "300")
        given |= {"HF_HUB_DISABLE_TELEMETRY": "1", **patient}
        return inherited | given | ({"HF_TOKEN": token} if token else {})

    def add(self, repository: str, files: dict[str, bytes], *, private: bool = False) -> Repository:
        """Add a repository with files, as if it had been pushed before."""
        made = Repository(private, {"main": [_commit("initial commit", {".gitattributes": b""} | files)]})
        self.repositories[repository] = made
        return made

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        commit = self.repositories[repository].at(revision)
        assert commit is not None
        return commit.files


def check_metadata(readme: str) -> list[str]:
    """Return what the Hub would refuse in a model card's metadata; it checks more than this does."""
    match = re.match(r"---\n(.*?)\n---\n", readme, re.DOTALL)
    data = yaml.safe_load(match[1]) if match else None
    if not isinstance(data, dict):
        return ["no metadata"]
    problems = []
    if data.get("base_model_relation", RELATIONS[0]) not in RELATIONS:
        problems.append(f'"base_model_relation" must be one of {RELATIONS}')
    if "license" in data and data["license"] not in LICENSES:
        problems.append(f'"license" must be one of {LICENSES}')
    for key in ("tags", "metrics"):
        if not all(isinstance(value, str) for value in data.get(key, ())):
            problems.append(f'"{key}" must be strings')
    for model in data.get("model-index", ()):
        for result in model["results"]:
            if not {"task", "dataset", "metrics"} <= set(result) or not {"type", "name"} <= set(result["dataset"]):
                problems.append('"model-index" must have task, dataset and metrics')
    return problems


def _commit(message: str, files: dict[str, bytes]) -> Commit:
    text = message + "".join(f"{name} {hashlib.sha1(content).hexdigest()}" for name, content in sorted(files.items()))
    return Commit(hashlib.sha1(text.encode()).hexdigest(), message, files)


def _git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def _oid(path: str, content: bytes) -> str:
    return hashlib.sha256(content).hexdigest() if path.endswith(LARGE) else _git_oid(content)


class _Refused(Exception):
    def __init__(self, status: int, code: str = "", message: str = ""):
        self.status, self.code, self.message = status, code, message


class _Handler(BaseHTTPRequestHandler):
    state: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self) -> None:
        path = unquote(urlparse(self.path).path)
        body = self._body()
        if path in self.state.refuse:
            self.state.one_came.wait(timeout=300)
        with self.state.lock:
            self.state.requests.append(f"{self.command} {path}")
            try:
                if path in self.state.refuse:
                    raise _Refused(self.state.refuse[path])
                for pattern, methods, function in _ROUTES:
                    match = re.fullmatch(pattern, path)
                    if match and self.command in methods:
                        function(self, body, **match.groupdict())
                        return
                raise _Refused(404, "EntryNotFound", "no such route")
            except _Refused as refused:
                self._send(
                    refused.status,
                    json.dumps({"error": refused.message}).encode(),
                    {"X-Error-Code": refused.code, "X-Error-Message": refused.message},
                )

    do_GET = do_HEAD = do_POST = do_PUT = _answer

    def _body(self) -> bytes:
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            if value:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _user(self) -> str | None:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if given and given not in self.state.tokens:
            raise _Refused(401, message="Invalid credentials in Authorization header")
        return self.state.tokens.get(given)

    def _repository(self, repository: str, *, write: bool = False) -> Repository:
        user = self._user()
        found = self.state.repositories.get(repository)
        if found is None or (found.private and repository.split("/")[0] != user):
            raise _Refused(404 if user else 401, "RepoNotFound", "Repository not found")
        if write and repository.split("/")[0] != user:
            raise _Refused(403, message="you don't have the right")
        return found

    def _at(self, repository: str, revision: str) -> Commit:
        commit = self._repository(repository).at(revision)
        if commit is None:
            raise _Refused(404, "RevisionNotFound", "Invalid rev id")
        return commit

    def whoami(self, body: bytes) -> None:
        user = self._user()
        if user is None:
            raise _Refused(401, message="Invalid credentials in Authorization header")
        self._json({"type": "user", "name": user, "orgs": []})

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        user = self._user()
        owner = asked.get("organization") or user
        repository = f"{owner}/{asked['name']}"
        url = {"url": f"{self.state.url}/{repository}"}
        if user is None or owner != user:
            raise _Refused(403 if user else 401, message="you don't have the right to create a model there")
        if repository in self.state.repositories:
            self._json(url, 409)
            return
        private = asked.get("visibility") == "private" or bool(asked.get("private"))
        self.state.add(repository, {}, private=private)
        self._json(url)

    def validate(self, body: bytes) -> None:
        problems = check_metadata(json.loads(body)["content"])
        answer = {"errors": [{"message": p} for p in problems], "warnings": []}
        self._json(answer, 400 if problems else 200)

    def info(self, body: bytes, repository: str, revision: str | None = None) -> None:
        commit = self._at(repository, revision or "main")
        found = self.state.repositories[repository]
        names = [{"rfilename": name} for name in sorted(commit.files)]
        about = {"_id": "0", "id": repository, "modelId": repository, "private": found.private, "tags": []}
        self._json({**about, "sha": commit.sha, "siblings": names, "downloads": 0})

    def tree(self, body: bytes, repository: str, revision: str, folder: str | None = None) -> None:
        files = self._at(repository, revision).files
        shown = {n: c for n, c in files.items() if folder is None or n.startswith(folder + "/")}
        if folder is not None and not shown:
            raise _Refused(404, "EntryNotFound", "no such folder")
        entries = []
        for name, content in sorted(shown.items()):
            entry: dict[str, Any] = {"type": "file", "path": name, "size": len(content), "oid": _git_oid(content)}
            if name.endswith(LARGE):
                entry["lfs"] = {"size": len(content), "oid": _oid(name, content), "pointerSize": 130}
            entries.append(entry)
        self._json(entries)

    def preupload(self, body: bytes, repository: str, revision: str) -> None:
        self._repository(repository, write=True)
        files = self._at(repository, revision).files
        answer = []
        for asked in json.loads(body)["files"]:
            name = asked["path"]
            mode = "lfs" if name.endswith(LARGE) else "regular"
            known = {"oid": _oid(name, files[name])} if name in files else {}
            answer.append({"path": name, "uploadMode": mode, "shouldIgnore": False, **known})
        self._json({"files": answer})

    def lfs_batch(self, body: bytes, repository: str) -> None:
        self._repository(repository, write=True)
        answer = []
        for asked in json.loads(body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.state.blobs:
                entry["actions"] = {"upload": {"href": f"{self.state.url}/blobs/{asked['oid']}"}}
            answer.append(entry)
        self._json({"transfer": "basic", "objects": answer})

    def put_blob(self, body: bytes, oid: str) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            raise _Refused(400, message="the content is not what its name says")
        self.state.blobs[oid] = body
        self.state.one_came.set()
        self._json({})

    def commit(self, body: bytes, repository: str, revision: str) -> None:
        found = self._repository(repository, write=True)
        files = dict(self._at(repository, revision).files)
        message = ""
        for line in body.splitlines():
            step = json.loads(line)
            value = step["value"]
            if step["key"] == "header":
                message = value["summary"]
            elif step["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif step["key"] == "lfsFile":
                files[value["path"]] = self.state.blobs[value["oid"]]
            elif step["key"] == "deletedFile":
                del files[value["path"]]
            else:
                raise _Refused(400, message=f"unknown operation {step['key']}")
        made = _commit(message, files)
        found.branches[revision].append(made)
        answer = {"commitOid": made.sha, "commitUrl": f"{self.state.url}/{repository}/commit/{made.sha}"}
        self._json({**answer, "hookOutput": "", "success": True})

    def resolve(self, body: bytes, repository: str, revision: str, path: str) -> None:
        commit = self._at(repository, revision)
        if path not in commit.files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit.sha})
            return
        content = commit.files[path]
        headers = {"ETag": f'"{_oid(path, content)}"', "X-Repo-Commit": commit.sha, "Accept-Ranges": "bytes"}
        self._send(200, content, headers)


_ID = r"(?P<repository>[^/]+/[^/]+)"
# A data set is a repository whose id here begins with "datasets/", as in its paths.
_DATA_ID = r"(?P<repository>datasets/[^/]+/[^/]+)"
_ROUTES: list[tuple[str, str, Any]] = [
    (r"/api/whoami-v2", "GET", _Handler.whoami),
    (r"/api/repos/create", "POST", _Handler.create),
    (r"/api/validate-yaml", "POST", _Handler.validate),
    (rf"/api/models/{_ID}(/revision/(?P<revision>[^/]+))?", "GET", _Handler.info),
    (rf"/api/models/{_ID}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "GET", _Handler.tree),
    (rf"/api/{_DATA_ID}(/revision/(?P<revision>[^/]+))?", "GET", _Handler.info),
    (rf"/api/{_DATA_ID}/tree/(?P<revision>[^/]+)(/(?P<folder>.+))?", "GET", _Handler.tree),
    (rf"/{_DATA_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "GET HEAD", _Handler.resolve),
    (rf"/api/models/{_ID}/preupload/(?P<revision>[^/]+)", "POST", _Handler.preupload),
    (rf"/{_ID}\.git/info/lfs/objects/batch", "POST", _Handler.lfs_batch),
    (r"/blobs/(?P<oid>[0-9a-f]{64})", "PUT", _Handler.put_blob),
    (rf"/api/models/{_ID}/commit/(?P<revision>[^/]+)", "POST", _Handler.commit),
    (rf"/{_ID}/resolve/(?P<revision>[^/]+)/(?P<path>.+)", "GET HEAD", _Handler.resolve),
]
