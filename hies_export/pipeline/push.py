"""Publish a finished run on the Hugging Face Hub, in one commit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperation, CommitOperationAdd, CommitOperationDelete, HfApi
from huggingface_hub.utils import validate_repo_id

from ..checkpoint.beside import LICENSE_KEYS, MODULES_FILE, read_card
from ..errors import OutputExistsError, PushError, RequestError, refusing
from ..progress import SILENT, Progress
from ..report.card import render_card
from ..report.figures import CAPTIONS, draw_report
from ..report.html import render_html, render_markdown
from ..report.report import Details, Report
from ..report.words import model_name, title

# Folders of the slim model's exports.
_EXPORTS = ("onnx", "onnx-int8", "onnx-int4", "onnx-cascade", "gguf")
# How files of an earlier push begin or end that go if this one does not write them.
_STALE_BEGINNINGS = tuple(f"{folder}/" for folder in (*_EXPORTS, "openvino", "images"))
_STALE_ENDINGS = (".safetensors", ".safetensors.index.json", ".py")


def push_to_hub(
    folder: str | Path,
    repository: str,
    *,
    private: bool = False,
    license: str | None = None,
    base_model: str | None = None,
    overwrite: bool = False,
    progress: Progress = SILENT,
) -> CommitInfo:
    """Push a run: the slim checkpoint at the top, its exports, the report, pictures, and a card with metadata.

    All files appear in one commit. By it, weights, exports and pictures of an earlier push go that are not among them.
    The client sends large files before the commit, each once. The token is read from `hf auth login` or `HF_TOKEN`.

    Licence ids: https://huggingface.co/docs/hub/repositories-licenses

    Args:
        folder: The folder that `run` wrote.
        repository: USER/REPO; created if it does not exist.
        private: Make the repository private.
        license: Licence of the model, if the dense model's card names none: an id of the Hub, such as "apache-2.0".
        base_model: Hub id of the dense model, if the run read it from a folder.
        overwrite: Replace all files of a repository, also of one that is not from an earlier push.
        progress: Shows the stages.

    Returns:
        The commit, with its address and hash.

    Raises:
        RequestError: The folder is not that of a run, the licence is unknown, the repository's name is none, or it
            must be private and is public. Nothing was sent.
        OutputExistsError: The repository has files that are not from an earlier push, and `overwrite` is off. Nothing
            was sent.
        PushError: The Hub refused the push, could not be reached, or the upload did not finish; nothing of it is
            visible.
    """
    with refusing("a repository must be USER/REPO", kind=RequestError):
        validate_repo_id(repository)
    report, folder = Report.from_file(folder), Path(folder)
    if not (folder / "slim" / "hies_plan.json").is_file():
        raise RequestError(f"a push needs the folder of a finished run, but {folder} has no slim/hies_plan.json")
    progress.stage("draw")
    dense = base_model or report.details.base_model
    origin = _origin(report, dense=dense, license=license)
    # The report without local paths: with the model's name, and without the command line.
    details = Details(**report.details.model_dump(exclude_unset=True, exclude={"run"}))
    public = replace(report, model=dense or model_name(report), details=details)
    contents = _contents(folder, public, repository, origin)
    progress.stage("push")
    remedy = "see what the Hub says, and run the same command again: what was already sent is not sent twice"
    with refusing(f"the push to {repository} did not finish, and nothing of it is visible there", remedy, PushError):
        api = HfApi(library_name="hies-export")
        repository = api.create_repo(repository, private=private or None, exist_ok=True).repo_id
        if private and not api.model_info(repository).private:
            raise RequestError(f"{repository} must be private, but it exists and is public; make it private there")
        existing = set(api.list_repo_files(repository)) - {".gitattributes"}
        if existing and "hies_plan.json" not in existing and not overwrite:
            raise OutputExistsError(
                f"a repository must be new, empty or of an earlier push, but {repository} has "
                f"{', '.join(sorted(existing)[:3])}; choose another, or give --overwrite (in Python overwrite=True)"
            )
        unwritten = sorted(existing - set(contents))
        stale = [n for n in unwritten if overwrite or n.startswith(_STALE_BEGINNINGS) or n.endswith(_STALE_ENDINGS)]
        operations: list[CommitOperation] = [CommitOperationDelete(name) for name in stale]
        operations += [CommitOperationAdd(name, content) for name, content in contents.items()]
        # Not upload_folder, which may make several commits: readers could then see half a checkpoint.
        return api.create_commit(repository, operations, commit_message=title(report))


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
    # A SentenceTransformer's folder has its graphs already, where the tools of the Hub look for them.
    exports = () if (folder / "slim" / MODULES_FILE).is_file() else _EXPORTS
    contents: dict[str, str | bytes] = {}
    for source, prefix in (("slim", ""), *((export, f"{export}/") for export in exports)):
        for path in sorted((folder / source).rglob("*")):
            name = path.relative_to(folder / source)
            if path.is_file() and not any(part.startswith(".") for part in name.parts):
                contents[f"{prefix}{name.as_posix()}"] = str(path)
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
