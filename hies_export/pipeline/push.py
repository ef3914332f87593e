"""Publish a finished run on the Hugging Face Hub, in one commit."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperation, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalTokenNotFoundError

from ..checkpoint.beside import LICENSE_KEYS, MODULES_FILE, read_card
from ..entry_points import COMPOUNDS
from ..errors import HiesError, OutputExistsError, PushError, RequestError, root_cause
from ..progress import SILENT, Progress
from ..report.card import render_card
from ..report.figures import CAPTIONS, draw_report
from ..report.html import render_html, render_markdown
from ..report.report import Details, Report
from ..report.words import model_name, title

# Folders of the slim model's exports.
_EXPORTS = ("onnx", "onnx-int8", "onnx-int4", *(f"onnx-{name}" for name in COMPOUNDS), "gguf")
# Deleted from an earlier push if this one does not write it: these folders, and files at the top with these endings.
_STALE_FOLDERS, _STALE_ENDINGS = (*_EXPORTS, "openvino", "images"), (".safetensors", ".safetensors.index.json", ".py")


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
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> Pushed:
    """Push a run: the slim checkpoint at the top, its exports, the report, pictures, and a card with metadata.

    All files appear in one commit. The client sends large files before it, each once, and retries by itself. The token
    is read from `hf auth login` or `HF_TOKEN`.

    Licence ids: https://huggingface.co/docs/hub/repositories-licenses

    Args:
        folder: The folder that `run` wrote.
        repository: USER/REPO; created if it does not exist.
        private: Make the repository private.
        license: Licence of the model, if the dense model's card names none: an id of the Hub, such as "apache-2.0".
        base_model: Hub id of the dense model, if the run read it from a folder.
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
    progress.stage("draw")
    dense = base_model or report.details.base_model
    origin = _origin(report, dense=dense, license=license)
    # The report without local paths: with the model's name, and without the command line.
    details = Details(**report.details.model_dump(exclude_unset=True, exclude={"run"}))
    public = replace(report, model=dense or model_name(report), details=details)
    contents = _contents(Path(folder), public, repository, origin)
    progress.stage("push")
    commit = _commit(repository, contents, title(report), private=private, overwrite=overwrite)
    size = sum(len(file) if isinstance(file, bytes) else Path(file).stat().st_size for file in contents.values())
    return Pushed(repository, commit.commit_url, commit.oid, tuple(contents), size)


def _commit(
    repository: str, contents: Mapping[str, str | bytes], message: str, *, private: bool, overwrite: bool
) -> CommitInfo:
    """Commit files, name -> path or bytes, to a repository, which is created if it does not exist.

    Refuse one that is neither new nor of an earlier push unless `overwrite`; delete what is left of an earlier push.
    """
    api = HfApi(library_name="hies-export")
    with _explained(repository):
        repository = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(repository).private:
            raise RequestError(f"{repository} must be private, but it exists and is public; make it private there")
        existing = set(api.list_repo_files(repository)) - {".gitattributes"}
        if existing and "hies_plan.json" not in existing and not overwrite:
            raise OutputExistsError(
                f"a repository must be new, empty or of an earlier push, but {repository} has "
                f"{', '.join(sorted(existing)[:3])}; choose another, or give --overwrite (in Python overwrite=True)"
            )
        stale = sorted(name for name in existing - set(contents) if overwrite or _is_replaced(name))
        operations: list[CommitOperation] = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(name, content) for name, content in contents.items()]
        # Not upload_folder, which may make several commits: readers could then see half a checkpoint.
        return api.create_commit(repository, operations, commit_message=message)


def _read_run(folder: Path) -> Report:
    """Return the report of a run's folder, after checking that the folder has the files that a push needs."""
    needed = ("report.json", "slim/config.json", "slim/hies_plan.json")
    missing = [name for name in needed if not (folder / name).is_file()]
    if not any((folder / name / "config.json").is_file() for name in _EXPORTS):
        missing.append("onnx/ or gguf/")
    if missing:
        raise RequestError(f"a push needs the folder of a finished run, but {folder} has no {missing[0]}")
    return Report.from_file(folder)


def _origin(report: Report, *, dense: str | None, license: str | None) -> dict[str, Any]:
    """Return the base model and the licence as metadata of a card: those of the dense model's card, or those given."""
    card = read_card(report.model) if Path(report.model).is_dir() else {}
    base = dense or card.get("base_model")
    if not card.get("license") and isinstance(base, str):
        card = read_card(base)
    named = card.get("license")
    if not (named or license) or (named and license and named != license):
        raise RequestError(
            f"a slim model keeps the licence of its dense model, {model_name(report)}, whose card names "
            f"{named or 'none'}, got license {license}; leave it out if the card names one, else give an id of "
            "https://huggingface.co/docs/hub/repositories-licenses"
        )
    licence = {key: card[key] for key in LICENSE_KEYS if key in card}
    return {"base_model": base, **(licence or {"license": license})}


def _contents(folder: Path, report: Report, repository: str, origin: Mapping[str, Any]) -> dict[str, str | bytes]:
    """Return all files of a push: name in the repository -> local path, or content; `origin` is that of `_origin`."""
    contents: dict[str, str | bytes] = {**_visible(folder / "slim")}
    # A SentenceTransformer's folder has its graphs already, where the tools of the Hub look for them.
    exports = () if (folder / "slim" / MODULES_FILE).is_file() else _EXPORTS
    for export in exports:
        contents |= {f"{export}/{name}": path for name, path in _visible(folder / export).items()}
    figures = draw_report(report)
    images = {f"images/{name}": CAPTIONS[name] for name in figures}
    written = {
        "report.json": report.to_json(),
        "report.md": render_markdown(report),
        "report.html": render_html(report, location=repository),
        **{f"images/{name}": svg for name, svg in figures.items()},
        "README.md": render_card(report, location=repository, origin=origin, images=images),
    }
    return contents | {name: text.encode() for name, text in written.items()}


def _visible(folder: Path) -> dict[str, str]:
    """Return relative -> full path of the files in a folder and below it, unless a file or its folder is hidden."""
    files = {path.relative_to(folder): path for path in sorted(folder.rglob("*")) if path.is_file()}
    return {
        name.as_posix(): str(path) for name, path in files.items() if not any(part[0] == "." for part in name.parts)
    }


def _is_replaced(name: str) -> bool:
    """Return whether a file of an earlier push is deleted if this push does not write it."""
    folder, slash, _ = name.partition("/")
    return folder in _STALE_FOLDERS if slash else name.endswith(_STALE_ENDINGS)


@contextmanager
def _explained(repository: str) -> Iterator[None]:
    """Turn any exception of the Hub client into an error whose message says what to do."""
    try:
        yield
    except HiesError:
        raise
    except HFValidationError as error:
        raise RequestError(f"a repository must be USER/REPO, got {repository!r}: {root_cause(error)}") from error
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
