"""Fixtures that several folders use, and an environment without network."""

import gc
import itertools
import os
import shutil
import sys

if "PYTEST_XDIST_WORKER" not in os.environ and ("-m", "gpu") not in itertools.pairwise(sys.argv):
    # What is compared with a CPU, or pretends devices, must meet no real one: not here, not in what is started here.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
# Torch's cache of the shapes that operators return costs more than it saves where every model is traced once: without
# it an export takes a fifth less time and writes the same graph.
os.environ["TORCH_FAKE_TENSOR_DISPATCH_CACHE"] = "0"
if "PYTEST_XDIST_WORKER" in os.environ:
    # As many workers as cores: threads of their own would only be in each other's way, those of subprocesses too.
    os.environ["OMP_NUM_THREADS"] = "1"

from collections.abc import Generator, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from support import disturbed
from support.browser import Browser
from support.hub import TOKEN, Hub
from support.lab import LAB
from support.models import SHARED
from support.runs import made_once, run_small_project, without_tracing
from support.traced import counted_once, operators_read_once, traced_once
from transformers.utils import logging

EXPORTER = ("export", "export_generative", "own_attention", "traces")


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    with LAB.shown(collector.path):
        return (yield)


@pytest.fixture(autouse=True, scope="module")
def _lab(request: pytest.FixtureRequest) -> Iterator[None]:
    with LAB.shown(request.path):
        yield


@pytest.fixture(autouse=True, scope="session")
def _calm() -> None:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    disturbed.disturb()


@pytest.fixture(autouse=True, scope="session")
def _operators_read_once() -> Iterator[None]:
    with operators_read_once():
        yield


@pytest.fixture(autouse=True, scope="module")
def _small_heap() -> None:
    """Collecting garbage, as every timing does first, takes half a second among the objects of what is imported."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _traced_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only tests of the exporter trace a model whose graph is known: a trace takes seconds."""
    of_the_exporter = request.path.parts[-2:] in {("onnx", f"test_{what}.py") for what in EXPORTER}
    with nullcontext() if of_the_exporter else traced_once():
        yield


@pytest.fixture(autouse=True, scope="module")
def _counted_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Only tests of the counts count the FLOPs of a model whose shapes are known."""
    with nullcontext() if request.path.parent.name == "measure" else counted_once():
        yield


@pytest.fixture(autouse=True)
def _same_seed() -> None:
    torch.manual_seed(0)
    disturbed.start_again()


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real models and data beside the checkout; a clone elsewhere has none."""
    if not (SHARED / "models").is_dir():
        pytest.skip("no ../shared: real models and data are not here")
    return SHARED


@pytest.fixture
def untraced() -> Iterator[None]:
    """Let runs write an ONNX file that is no graph, in a fraction of the time."""
    with without_tracing():
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with its graphs, for all modules; its dense model is `model` beside it. Nobody writes there."""
    return made_once(tmp_path_factory, "finished", run_small_project) / "out"


@pytest.fixture(scope="session")
def chromium() -> str:
    """A headless Chromium: $CHROME_PATH, or one on the path."""
    names = (os.environ.get("CHROME_PATH", ""), "chromium", "chromium-browser", "google-chrome", "chrome")
    found = next((path for name in names if name and (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here: set CHROME_PATH, or install one")
    return found


@pytest.fixture(scope="session")
def browser(chromium: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One browser for all tests."""
    opened = Browser(chromium, tmp_path_factory.mktemp("browser") / "profile")
    try:
        yield opened
    finally:
        opened.close()


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A Hub that the client in this process talks to, too, with a token."""
    with Hub(tokens={TOKEN: "user"}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.url)
        template = running.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield running
