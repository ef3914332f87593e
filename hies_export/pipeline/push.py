"""Publish a finished run on the Hugging Face Hub, in one commit.

The input is the folder that a run wrote. The repository gets the slim checkpoint at the top, `onnx/`, the report, its
figures, and a card with the metadata that the Hub requires.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitOperation,
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    ModelInfo,
)
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from ..checkpoint.beside import LICENSE_KEYS, read_card
from ..checkpoint.sentence import MODULES_FILE
from ..entry_points import COMPOUNDS
from ..errors import HiesError, OutputExistsError, PushError, RequestError, refusing, root_cause
from ..progress import SILENT, Progress
from ..report.card import render_card
from ..report.figures import CAPTIONS, draw_report
from ..report.html import render_html, render_markdown
from ..report.report import Details, Report
from ..report.words import model_name, title

MAIN = "main"
# Files of an earlier push, deleted if this push does not write them.
_REPLACED = ("*.safetensors", "*.safetensors.index.json", "modeling_hies.py")
# Folders of the slim model's exports.
_EXPORTS = ("onnx", "onnx-int8", "onnx-int4", *(f"onnx-{name}" for name in COMPOUNDS), "gguf")
_REPLACED_FOLDERS = (*_EXPORTS, "openvino", "images")


@dataclass(frozen=True)
class Pushed:
    """The result of a push: Hub id, address and hash of the commit, and the pushed files with their total size."""

    repository: str
    url: str
    commit: str
    files: tuple[str, ...]
    bytes: int


def push_to_hub(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    license: str | None = None,
    base_model: str | None = None,
    revision: str = MAIN,
    message: str | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Pushed:
    """Push a run: the slim checkpoint, its exports, the report, pictures, and a card with metadata.

    All files appear in one commit. Large files are uploaded before the commit, each once: after an interruption, the
    same call sends only the missing ones. The token is read from `hf auth login` or `HF_TOKEN`.

    Licence ids: https://huggingface.co/docs/hub/repositories-licenses

    Args:
        folder: The folder that `run` wrote.
        repository: USER/REPO; created if it does not exist.
        private: Make the repository private.
        license: Licence of the model, if the dense model's card names none: an id of the Hub, such as "apache-2.0".
        base_model: Hub id of the dense model, if the run read it from a folder.
        revision: Branch; created from the main branch if it does not exist.
        message: Commit message; by default the report's headline.
        overwrite: Replace all files of a repository that is not from an earlier push.
        progress: Shows the stages.

    Returns:
        The address of the commit, and the files it has.

    Raises:
        RequestError: The folder is not that of a run, the licence is unknown, there is no token, or the token may not
            write to the repository. Nothing was sent.
        OutputExistsError: The repository has files that are not from an earlier push, and `overwrite` is off. Nothing
            was sent.
        PushError: The Hub could not be reached, or the upload did not finish; nothing of it is visible.
    """
    report = _read_run(Path(folder))
    _check_name(repository)
    progress.stage("look up")
    api = HfApi(library_name="hies-export")
    with _explain_failure(repository):
        api.whoami()  # first: without a valid token a private repository seems not to exist
        info = _look_up(api, repository)
        found = set() if info is None else _files(api, repository, revision)
        if base_model is not None and _look_up(api, base_model) is None:
            raise RequestError(
                f"the base model must be a Hub id, but there is no model {base_model} on the Hub that this token may "
                "read; leave base_model= out if the dense model is not published"
            )
    dense = base_model or report.details.base_model
    origin = _origin(report, dense=dense, license=license)
    _check_repository(repository, info, found, private=private, overwrite=overwrite)
    progress.stage("draw")
    # The report without local paths: with the model's name, and without the command line.
    details = Details(**report.details.model_dump(exclude_unset=True, exclude={"run"}))
    public = replace(report, model=dense or model_name(report), details=details)
    contents = _contents(Path(folder), public, repository, None if revision == MAIN else revision, origin)
    stale = sorted(name for name in found - set(contents) if overwrite or _is_replaced(name))
    operations: list[CommitOperation] = [CommitOperationDelete(name) for name in stale if name != ".gitattributes"]
    operations += [CommitOperationAdd(name, content) for name, content in contents.items()]
    progress.stage("push")
    with _explain_failure(repository):
        if info is None:
            api.create_repo(repository, private=private or None, exist_ok=True)
        if revision != MAIN:
            api.create_branch(repository, branch=revision, exist_ok=True)
        # upload_folder may split a large folder into several commits; readers could then see half a checkpoint.
        made = api.create_commit(repository, operations, commit_message=message or title(report), revision=revision)
    size = sum(len(c) if isinstance(c, bytes) else Path(c).stat().st_size for c in contents.values())
    return Pushed(repository, made.commit_url, made.oid, tuple(contents), size)


def push_folder(folder: str | Path, repository: str, *, private: bool = False) -> str:
    """Push the files of a checkpoint's folder in one commit, and return the commit's address."""
    api = HfApi(library_name="hies-export")
    with _explain_failure(repository):
        target = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        operations = [CommitOperationAdd(name, str(path)) for name, path in _visible(Path(folder)).items()]
        made = api.create_commit(target, operations, commit_message=f"Add {Path(folder).name}, pruned")
    return str(made.commit_url)


def _read_run(folder: Path) -> Report:
    """Return the report of a run's folder, after checking that the folder has the files that a push needs."""
    needed = ("report.json", "slim/config.json", "slim/hies_plan.json")
    missing = [name for name in needed if not (folder / name).is_file()]
    if not any((folder / name / "config.json").is_file() for name in _EXPORTS):
        missing.append("onnx/ or gguf/")
    if missing:
        raise RequestError(
            f"a push needs the folder of a finished run, but {folder} has no {missing[0]}; give the folder that a "
            "run wrote"
        )
    return Report.from_file(folder)


def _check_name(repository: str) -> None:
    with refusing(f"a repository must be USER/REPO, got {repository!r}"):
        validate_repo_id(repository)
        if repository.count("/") != 1:
            raise HFValidationError("it has no user or organization")


def _origin(report: Report, *, dense: str | None, license: str | None) -> dict[str, Any]:
    """Return the base model and the licence as metadata of a model card.

    `dense` is the Hub id of the dense model, or None if it is in a folder, whose card may name a base model. `license`
    was given by the user, and must not differ from the card's.
    """
    cards = [read_card(report.model)] if Path(report.model).is_dir() else []
    base = dense or next((card.get("base_model") for card in cards), None)
    if isinstance(base, str):
        cards.append(read_card(base))
    licensed = next((card for card in cards if card.get("license")), None)
    name = model_name(report)
    if licensed is None and license is None:
        raise RequestError(
            f"the licence of {name} must be known before a model made from it is published, but no card names it; give "
            "it as license=, an id of https://huggingface.co/docs/hub/repositories-licenses"
        )
    if licensed is not None and license not in (None, licensed["license"]):
        raise RequestError(
            f"a slim model keeps the licence of its dense model, {name}, which is {licensed['license']}, got "
            f"{license}; leave license= out"
        )
    inherited = {key: licensed[key] for key in LICENSE_KEYS if key in licensed} if licensed else {"license": license}
    return {"base_model": base, **inherited}


def _look_up(api: HfApi, repository: str) -> ModelInfo | None:
    try:
        return api.model_info(repository)
    except (RepositoryNotFoundError, HFValidationError):
        return None


def _files(api: HfApi, repository: str, revision: str) -> set[str]:
    """Return the names of the files on a branch; for a branch that does not exist yet, those on the main branch."""
    try:
        return set(api.list_repo_files(repository, revision=revision))
    except RevisionNotFoundError:
        return set(api.list_repo_files(repository))


def _check_repository(
    repository: str, info: ModelInfo | None, found: set[str], *, private: bool, overwrite: bool
) -> None:
    if info is not None and private and not info.private:
        raise RequestError(
            f"{repository} must be private, but it exists and is public; make it private in its settings, or choose "
            "another"
        )
    other = sorted(found - {".gitattributes"})
    if other and "hies_plan.json" not in other and not overwrite:
        raise OutputExistsError(
            f"a repository must be new, empty or of an earlier push, but {repository} has {', '.join(other[:3])}; "
            "choose another or pass overwrite=True to replace what is there"
        )


def _contents(
    folder: Path, report: Report, repository: str, revision: str | None, origin: Mapping[str, Any]
) -> dict[str, Any]:
    """Return all files of a push: name in the repository -> local path, or the content as bytes."""
    contents: dict[str, Any] = {}
    # A SentenceTransformer's folder has its graphs already, where the tools of the Hub look for them.
    exports = () if (folder / "slim" / MODULES_FILE).is_file() else _EXPORTS
    for source, prefix in ((folder / "slim", ""), *((folder / name, f"{name}/") for name in exports)):
        contents |= {prefix + name: str(path) for name, path in _visible(source).items()}
    figures = draw_report(report)
    images = {f"images/{name}": CAPTIONS[name] for name in figures}
    written = {
        "report.json": report.to_json(),
        "report.md": render_markdown(report),
        "report.html": render_html(report, location=repository),
        **{f"images/{name}": svg for name, svg in figures.items()},
        "README.md": render_card(report, location=repository, revision=revision, origin=origin, images=images),
    }
    return contents | {name: text.encode() for name, text in written.items()}


def _visible(folder: Path) -> dict[str, Path]:
    """Return the files below a folder by their names in it, without hidden ones and those in hidden folders."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): path for name, path in files.items() if not any(part.startswith(".") for part in name.parts)
    }


def _is_replaced(name: str) -> bool:
    first, slash, _ = name.partition("/")
    return first in _REPLACED_FOLDERS if slash else any(fnmatch(name, pattern) for pattern in _REPLACED)


@contextmanager
def _explain_failure(repository: str) -> Iterator[None]:
    """Turn any exception of the Hub client into an error whose message says what to do."""
    try:
        yield
    except HiesError:
        raise
    except Exception as error:  # the Hub, the network and the storage each raise their own classes
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        if status in (401, 403) or isinstance(error, LocalTokenNotFoundError):
            raise RequestError(
                f"a push needs a token of the Hub with the right to write to {repository}, but: {root_cause(error)}; "
                "log in with 'hf auth login', or set HF_TOKEN"
            ) from error
        raise PushError(
            f"the push to {repository} did not finish ({root_cause(error)}); nothing of it is visible there; run it "
            "again, and what was already sent is not sent twice"
        ) from error
