"""Push a finished run to the Hub: checkpoint, ONNX, report and model card."""

from __future__ import annotations

from argparse import ArgumentParser
from pathlib import Path
from typing import Any

from .arguments import Options, refuse_other_than_run


def add_arguments(parser: ArgumentParser) -> None:
    """Add the run, the repository and what its card says."""
    add = parser.add_argument
    add("folder", metavar="RUN", type=Path, help="folder of a run")
    add("repository", metavar="USER/REPO", help="repository; created if missing")
    add("--private", action="store_true", help="make the repository private")
    add("--license", metavar="ID", help="license of the model, if the dense model's card names none")
    add("--base-model", metavar="ID", help="Hub id of the dense model, if it was read from a folder")
    add("--overwrite", action="store_true", help="replace whatever the repository holds")


def run(options: Options) -> dict[str, Any]:
    """Upload the run, and return the repository, and the address and the hash of the commit."""
    refuse_other_than_run(options.folder, needs="a push needs the folder of a run")
    from ..pipeline.push import push_to_hub  # after the refusal, because it takes seconds

    commit = push_to_hub(
        options.folder,
        options.repository,
        private=options.private,
        license=options.license,
        base_model=options.base_model,
        overwrite=options.overwrite,
        progress=options.progress,
    )
    options.console.print(
        f'pushed as {commit.commit_url}\nload it with: hies_export.load("{options.repository}")', soft_wrap=True
    )
    return {"repository": options.repository, "url": commit.commit_url, "commit": commit.oid}
