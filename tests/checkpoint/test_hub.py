"""Models and data sets of a Hub that does not answer: from the clients' caches, or refused."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import torch
from huggingface_hub import constants
from support.hub import Hub
from support.models import bert, save_text_model

import hies_export
from hies_export.checkpoint.beside import fetch_whole
from hies_export.checkpoint.weights import weight_files
from hies_export.data.processors import load_processor
from hies_export.data.rows import load_rows
from hies_export.errors import DataError, RequestError
from hies_export.tasks import TASKS

ROWS = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]


@pytest.fixture(autouse=True)
def waited(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds that the client would have waited to try again."""
    waited: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", waited.append)
    return waited


def leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the clients look for the Hub where nobody listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A Hub that does not answer, and empty caches."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    leave(monkeypatch)
    return


def test_what_is_nowhere_is_refused(gone: None, waited: list[float]) -> None:
    sentence = (
        "a model must be a folder, on the Hub or in its cache, but org/model is not: Conn.*; give a folder, or try"
    )
    with pytest.raises(RequestError, match=sentence):
        hies_export.load("org/model")
    assert waited == []
    with pytest.raises(DataError, match=r"'org/rows/plain' could not be loaded from the Hub: .*; check its name"):
        load_rows(name="org/rows/plain", split="train")
    assert sum(waited) < 60


def test_a_cached_model_serves_without_the_hub_unless_it_is_damaged(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, waited: list[float]
) -> None:
    save_text_model(tmp_path / "model")
    hub.add("org/model", {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()})
    first = hies_export.load("org/model")
    assert first.name_or_path == first.config.name_or_path == "org/model"
    leave(monkeypatch)
    again = hies_export.load("org/model")
    load_processor(fetch_whole("org/model"), task=TASKS["text-classification"])
    assert waited == []
    for name, values in first.state_dict().items():
        assert torch.equal(values, again.state_dict()[name])
    for found in Path(constants.HF_HUB_CACHE).rglob("model.safetensors"):
        file = found.resolve()
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RequestError, match="SafetensorError"):  # damaged, and not missing
        hies_export.load("org/model")


@pytest.mark.parametrize("safe", [True, False])
def test_the_files_of_a_cached_model_are_found_without_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, safe: bool
) -> None:
    model = bert()
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    if not safe:
        model.config.save_pretrained(tmp_path / "older")
        torch.save(model.state_dict(), tmp_path / "older" / "pytorch_model.bin")
    files = sorted((tmp_path / ("model" if safe else "older")).iterdir())
    hub.add("org/shards", {f.name: f.read_bytes() for f in files})
    hies_export.load("org/shards")
    leave(monkeypatch)
    found = {file.name for file in weight_files(fetch_whole("org/shards"))}
    assert found == {file.name for file in files if file.suffix in (".safetensors", ".bin")}


def test_a_cached_data_set_serves_without_the_hub(gone: None, tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    # A data set of the Hub is cached like files, under its own name.
    datasets.load_dataset("json", data_files=str(tmp_path / "train.jsonl"), cache_dir=str(tmp_path / "made"))
    (made,) = (tmp_path / "made" / "json").glob("*/*/*/dataset_info.json")
    cached = tmp_path / "datasets" / "org___rows" / "default" / "0.0.0" / "0"
    cached.parent.mkdir(parents=True)
    made.parent.rename(cached)
    (cached / "json-train.arrow").rename(cached / "rows-train.arrow")
    info = json.loads((cached / "dataset_info.json").read_text())
    (cached / "dataset_info.json").write_text(json.dumps(info | {"config_name": "default", "dataset_name": "rows"}))
    assert load_rows(name="org/rows", split="train").to_list() == ROWS


def test_files_on_this_machine_ask_nothing(gone: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask() -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr("huggingface_hub.utils._http.get_session", ask)
    save_text_model(tmp_path / "model")
    hies_export.load(tmp_path / "model")
    load_processor(tmp_path / "model", task=TASKS["text-classification"])
    with pytest.raises(RequestError, match="nowhere is not there"):
        hies_export.load(tmp_path / "nowhere")
