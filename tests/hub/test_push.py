"""Push a run to a Hub on the loopback interface with the real client, and load it from there."""

import hashlib
import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard, constants
from support.hub import TOKEN, Hub, check_metadata
from support.reports import DATA, make_report
from support.runs import hies
from support.tolerance import assert_near

import hies_export
from hies_export import OutputExistsError, PushError, RequestError, push_to_hub
from hies_export.report.card import render_card

# What the client says of itself where it sends bytes.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>' to upload raw bytes:DeprecationWarning")

READ_TOKEN = "hf_ofsomebodyelse"
HIDDEN = ("slim/.env", "slim/.git/config", "onnx/.ipynb_checkpoints/model.onnx")


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """What a push reads of a run; the weights are no weights."""
    folder = tmp_path / "run"
    files = {
        "report.json": make_report().to_json(),
        "slim/config.json": "{}",
        "slim/hies_plan.json": "{}",
        "slim/model.safetensors": "slim weights",
        "slim/README.md": "the card of the folder",
        "onnx/config.json": "{}",
        "onnx/model.onnx": "graph",
        **dict.fromkeys(HIDDEN, "a password"),
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
    return folder


# Run in a process of its own, with an empty cache; first without the package as on a machine of transformers alone.
LOAD = """
import sys
repository, folder = sys.argv[1:]
import torch, transformers
tokenizer = transformers.AutoTokenizer.from_pretrained(repository)
batch = tokenizer(["good nice dull", "bad"], padding=True, return_tensors="pt")
def keep(way, load, **how):
    torch.save(load(repository, **how)(**batch).logits.detach(), f"{folder}/{way}.pt")
sys.modules["hies_export"] = None
keep("transformers", transformers.AutoModelForSequenceClassification.from_pretrained, trust_remote_code=True)
del sys.modules["hies_export"]
import hies_export
keep("load", hies_export.load)
"""


@pytest.mark.slow
def test_what_was_pushed_loads_in_a_fresh_process_in_every_way(
    hub: Hub, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before_it_moved, project = str(finished.parent), shutil.copytree(finished.parent, tmp_path / "project")
    run = project / "out"
    (run / "report.json").write_text((run / "report.json").read_text().replace(before_it_moved, str(project)))
    card = "---\nlicense: other\nlicense_name: mine\nlicense_link: LICENSE\nbase_model: some/bert\n---\n# Dense\n"
    (project / "model" / "README.md").write_text(card)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    capsys.readouterr()
    assert hies("push", run, "user/slim", "--private", "--json") == 0
    shown = capsys.readouterr()
    told = json.loads(shown.out.splitlines()[-1])
    done = subprocess.run(
        [sys.executable, "-c", LOAD, "user/slim", str(tmp_path)],
        env=hub.environment(tmp_path / "home", TOKEN),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    printed = [shown.out, shown.err, done.stdout, done.stderr]
    repository = hub.repositories["user/slim"]
    files = hub.files("user/slim")
    batch = {"input_ids": torch.tensor([[2, 5, 11, 12, 3], [2, 6, 3, 0, 0]])}
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    expected = hies_export.load(run / "slim")(**batch).logits
    for way in ("load", "transformers"):
        assert_near(torch.load(tmp_path / f"{way}.pt"), expected)

    assert repository.private
    first, made = repository.branches["main"]
    assert (first.message, told["commit"]) == ("initial commit", made.sha)
    for name in ("model.safetensors", "modeling_hies.py", "hies_plan.json", "tokenizer.json"):
        assert files[name] == (run / "slim" / name).read_bytes()
    assert files["onnx/model.onnx"] == (run / "onnx" / "model.onnx").read_bytes()

    # Tokens, and where this machine keeps its models, are nobody's business.
    written = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path: written[path] for path in before} == before
    assert not any(TOKEN.encode() in content for content in (*written.values(), *files.values()))
    assert not any(TOKEN in text for text in printed)
    places = (str(tmp_path), before_it_moved)
    assert not any(place.encode() in content for content in files.values() for place in places)

    (tmp_path / "README.md").write_bytes(files["README.md"])
    loaded = ModelCard.load(tmp_path / "README.md")
    data = loaded.data.to_dict()
    assert check_metadata(str(loaded)) == []
    inherited = ("license", "license_name", "license_link", "base_model", "base_model_relation")
    assert [data[key] for key in inherited] == ["other", "mine", "LICENSE", "some/bert", "finetune"]
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-classification")
    (result,) = loaded.data.eval_results
    assert result.metric_value == json.loads((run / "report.json").read_text())["quality"]["slim"]
    assert (result.metric_type, result.dataset_name) == ("accuracy", "validation.jsonl")
    assert result.dataset_split == "validation"
    assert "5 of 12 heads removed" in loaded.text
    for way in (
        'hies_export.load("user/slim")',
        'AutoModelForSequenceClassification.from_pretrained("user/slim", trust_remote_code=True)',
        'ORTModelForSequenceClassification.from_pretrained("user/slim", subfolder="onnx")',
    ):
        assert way in loaded.text


def test_an_interrupted_upload_shows_nothing_and_goes_on(hub: Hub, run_folder: Path) -> None:
    graph = f"/blobs/{hashlib.sha256(b'graph').hexdigest()}"
    hub.refuse[graph] = 400
    with pytest.raises(PushError, match=r"push to user/slim did not finish, and nothing .* is visible.*run the same"):
        push_to_hub(run_folder, "user/slim", license="mit")
    assert set(hub.files("user/slim")) == {".gitattributes"}
    sent = {f"PUT /blobs/{oid}" for oid in hub.blobs}
    assert sent
    del hub.refuse[graph]
    hub.requests.clear()
    push_to_hub(run_folder, "user/slim", license="mit")
    sent_now = {r for r in hub.requests if r.startswith("PUT")}
    assert f"PUT {graph}" in sent_now
    assert not sent & sent_now
    assert hub.files("user/slim")["onnx/model.onnx"] == b"graph"
    # Again: nothing is new, no commit.
    push_to_hub(run_folder, "user/slim", license="mit")
    assert len(hub.repositories["user/slim"].branches["main"]) == 2


def test_another_push_replaces_the_earlier_one_only(hub: Hub, run_folder: Path) -> None:
    (graph := run_folder / "slim" / "openvino" / "openvino_model.xml").parent.mkdir()
    graph.write_text("a graph")
    push_to_hub(run_folder, "user/slim", license="mit")
    assert "openvino/openvino_model.xml" in hub.files("user/slim")
    hub.files("user/slim")["LICENSE"] = b"added by hand"
    graph.unlink()
    (run_folder / "slim" / "model.safetensors").rename(run_folder / "slim" / "model-00001-of-00001.safetensors")
    (run_folder / "onnx" / "model.onnx").rename(run_folder / "onnx" / "decoder_model_merged.onnx")
    push_to_hub(run_folder, "user/slim", license="mit")
    files = set(hub.files("user/slim"))
    assert {"LICENSE", "model-00001-of-00001.safetensors", "onnx/decoder_model_merged.onnx"} <= files
    assert not {"model.safetensors", "onnx/model.onnx", "openvino/openvino_model.xml"} & files
    assert b"a password" not in hub.files("user/slim").values()
    card = ModelCard(hub.files("user/slim")["README.md"].decode())
    pictures = [line.rpartition("(")[2][:-1] for line in card.text.splitlines() if line.startswith("![")]
    assert {"images/heads.svg", "images/latency.svg"} <= {*pictures} <= files
    assert all(hub.files("user/slim")[name].startswith(b"<svg ") for name in pictures)


def test_other_content_is_refused_or_replaced_whole(hub: Hub, run_folder: Path) -> None:
    hub.add("user/theirs", {"pytorch_model.bin": b"weights", "README.md": b"a card"})
    with pytest.raises(OutputExistsError, match=r"new, empty or of an earlier push, but user/theirs has README.md, py"):
        push_to_hub(run_folder, "user/theirs", license="mit")
    assert len(hub.repositories["user/theirs"].branches["main"]) == 1
    push_to_hub(run_folder, "user/theirs", license="mit", overwrite=True)
    assert "pytorch_model.bin" not in hub.files("user/theirs")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"token": None}, r"the push to user/there did not finish.*403"),
        ({"token": "hf_unheardof"}, r"the push to user/there did not finish.*401"),
        ({"token": READ_TOKEN}, r"the push to user/there did not finish.*403"),
        ({"token": READ_TOKEN, "repository": "user/new"}, r"the push to user/new did not finish.*403"),
        ({"repository": "user/so bad"}, r"a repository must be USER/REPO.*Repo id must"),
        ({"license": None}, r"of its dense model, some/model, whose card names none, got license None; .* give an id"),
        (
            {"base_model": "user/dense"},
            r"keeps the licence of its dense model, .* names apache-2.0, got license mit; leave",
        ),
        ({"private": True}, r"user/there must be private, but it exists and is public"),
    ],
)
def test_a_wrong_request_sends_nothing(
    given: dict[str, Any], match: str, hub: Hub, run_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("user/there", {})
    hub.add("user/dense", {"README.md": b"---\nlicense: apache-2.0\n---\n"})
    hub.tokens[READ_TOKEN] = "other"
    token = given.pop("token", TOKEN)
    if token is None:
        monkeypatch.delenv("HF_TOKEN")
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(run_folder / "no token"))
    else:
        monkeypatch.setenv("HF_TOKEN", token)
    options = {"repository": "user/there", "license": "mit"} | given
    with pytest.raises((RequestError, PushError), match=match) as error:
        push_to_hub(run_folder, options.pop("repository"), **options)
    assert TOKEN not in str(error.value)
    assert READ_TOKEN not in str(error.value)
    assert not hub.blobs
    assert [len(r.branches["main"]) for r in hub.repositories.values()] == [1, 1]


def test_the_licence_of_the_base_model_on_the_hub_is_inherited(hub: Hub, run_folder: Path) -> None:
    hub.add("user/dense", {"README.md": b"---\nlicense: apache-2.0\n---\n"})
    push_to_hub(run_folder, "user/slim", base_model="user/dense")
    text = hub.files("user/slim")["README.md"].decode()
    assert "license: apache-2.0\n" in text
    assert "base_model: user/dense\n" in text
    page = hub.files("user/slim")["report.html"].decode()
    assert "from_pretrained(&quot;user/slim&quot;)" in page
    assert "user/dense" in page


@pytest.mark.parametrize("missing", ["report.json", "slim/hies_plan.json"])
def test_a_folder_that_is_no_run_is_refused(missing: str, run_folder: Path) -> None:
    (run_folder / missing).unlink()
    with pytest.raises(RequestError, match=f"{run_folder}.*{missing}|{missing}.*{run_folder}"):
        push_to_hub(run_folder, "user/slim", license="mit")


def test_a_card_of_models_and_data_from_the_hub() -> None:
    data = DATA | {"name": "nyu-mll/glue/sst2", "evaluation_split": "validation[:100]"}
    report = make_report(data=data, custom_code=False)
    text = render_card(report, location="me/slim", origin={"base_model": "some/model", "license": "mit", "tags": ["x"]})
    metadata = ModelCard(text).data
    assert (metadata.base_model, metadata.license, metadata.datasets) == ("some/model", "mit", "nyu-mll/glue")
    assert [(r.dataset_type, r.dataset_config, r.metric_type, r.metric_value) for r in metadata.eval_results] == [
        ("nyu-mll/glue", "sst2", "accuracy", 0.89),
        ("nyu-mll/glue", "sst2", "f1", 0.81),
    ]
    assert "trust_remote_code" not in text
    generative = render_card(replace(report, task="text-generation"), location="me/slim")
    assert 'generate_text(snapshot_download("me/slim", allow_patterns="onnx/*") + ' in generative
    assert "base_model" not in ModelCard(generative).data.to_dict()


def test_a_sentence_transformer_is_pushed_as_its_folder_is(hub: Hub, run_folder: Path) -> None:
    for name in ("modules.json", "1_Pooling/config.json", "onnx/model.onnx"):
        (run_folder / "slim" / name).parent.mkdir(exist_ok=True)
        (run_folder / "slim" / name).write_text("its own")
    push_to_hub(run_folder, "user/slim", license="mit")
    files = hub.files("user/slim")
    assert {"modules.json", "1_Pooling/config.json"} <= set(files)
    assert files["onnx/model.onnx"] == b"its own"
    assert "onnx/config.json" not in files
