"""Models and data sets of a Hub that does not answer: from the cache, or refused at once."""

import json
import logging
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
from hies_export.checkpoint.weights import weight_files
from hies_export.data.processors import load_processor
from hies_export.data.rows import load_rows
from hies_export.errors import DataError, RequestError
from hies_export.model import online
from hies_export.tasks import TASKS

ROWS = [{"text": "good", "label": 1}, {"text": "bad", "label": 0}]


@pytest.fixture(autouse=True)
def _no_second_try(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget what was asked before, and fail where a client waits to try again."""
    waited: list[float] = []

    def wait(seconds: float) -> None:
        waited.append(seconds)
        raise TimeoutError("a client would have tried again")

    monkeypatch.setattr(online, "_answers", {})
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)  # it keeps the address of its first use
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", wait)
    yield
    assert waited == []


def leave(monkeypatch: pytest.MonkeyPatch) -> str:
    """Have the clients look for the Hub where nobody listens, and return that address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", url)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    return url


@pytest.fixture
def gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """A Hub that does not answer, and empty caches."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "datasets")
    yield leave(monkeypatch)
    assert not constants.HF_HUB_OFFLINE
    assert not datasets.config.HF_HUB_OFFLINE


def test_what_is_nowhere_is_refused_at_once(gone: str) -> None:
    sentence = rf" must be .* but org/{{}} is not here, and the Hub at {gone} cannot be reached"
    model = "a model" + sentence.format("model")
    with pytest.raises(RequestError, match=model + r" \(.+\); give a local path, or .* HF_HUB_OFFLINE=1"):
        hies_export.load("org/model")
    with pytest.raises(DataError, match=model):
        load_processor("org/model", task=TASKS["text-classification"])
    with pytest.raises(DataError, match="a data set" + sentence.format("rows")):
        load_rows(name="org/rows/plain", split="train")


def test_a_cached_model_serves_without_the_hub_unless_it_is_damaged(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save_text_model(tmp_path / "model")
    hub.add("org/model", {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()})
    first = hies_export.load("org/model")
    load_processor("org/model", task=TASKS["text-classification"])
    assert hub.requests.count("HEAD /") == 1
    leave(monkeypatch)
    with caplog.at_level(logging.WARNING):
        again = hies_export.load("org/model")
        load_processor("org/model", task=TASKS["text-classification"])
    assert "cannot be reached" in caplog.text
    assert "the cached copy of org/model is used" in caplog.text
    assert {record.name for record in caplog.records} == {online.__name__}
    for name, values in first.state_dict().items():
        assert torch.equal(values, again.state_dict()[name])
    assert not constants.HF_HUB_OFFLINE
    for found in Path(constants.HF_HUB_CACHE).rglob("model.safetensors"):
        file = found.resolve()
        file.chmod(0o644)
        file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(RequestError, match="SafetensorError"):  # damaged, and not missing
        hies_export.load("org/model")


def test_the_files_of_a_cached_model_are_found_without_the_hub(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    bert().save_pretrained(tmp_path / "model", max_shard_size="20KB")
    hub.add("org/shards", {f.name: f.read_bytes() for f in (tmp_path / "model").iterdir()})
    hies_export.load("org/shards")
    leave(monkeypatch)
    found = {file.name for file in weight_files("org/shards")}
    assert found == {file.name for file in (tmp_path / "model").glob("*.safetensors")}


def test_a_cached_data_set_serves_without_the_hub(gone: str, tmp_path: Path) -> None:
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


def test_files_on_this_machine_ask_nothing(gone: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def ask() -> None:
        raise AssertionError("the Hub was asked")

    monkeypatch.setattr(online, "get_session", ask)
    save_text_model(tmp_path / "model")
    hies_export.load(tmp_path / "model")
    load_processor(tmp_path / "model", task=TASKS["text-classification"])
    with pytest.raises(RequestError, match="nowhere is not there"):
        hies_export.load(tmp_path / "nowhere")
