"""The run that the tests of the page explore."""

from pathlib import Path

import pytest
from support.runs import run_project


@pytest.fixture(scope="package")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with alpha: auto, and its project above it."""
    prune = {"alpha": "auto", "budget": {"heads": 0.4}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hies_export.pipeline.stages.ALPHAS", (0.0, 0.5, 0.9))  # fewer to judge
        return run_project(tmp_path_factory.mktemp("project"), train=40, validation=20, prune=prune)
