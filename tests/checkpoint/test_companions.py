"""What is fetched and copied beside the weights: a tokenizer, a processor, a licence, and nothing links lead to."""

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import transformers
from support.hub import Hub
from support.models import save_text_model

from hies_export.checkpoint.companions import COMPANIONS, DOCUMENTS, copy_companions, fetch, fetch_files
from hies_export.errors import RequestError

OURS = (
    *("tokenizer.json", "tokenizer_config.json", "vocab.txt", "spiece.model", "preprocessor_config.json"),
    *("LICENSE", "licence.md", "Notice.txt", "USE_POLICY.md", "MODEL_LICENSE", "COPYING", "citation.cff"),
)
TEMPLATES = ("chat_template.jinja", "additional_chat_templates/tools.jinja")
# What a trainer, git, and people leave in the folder of a checkpoint.
OTHERS = (
    *("README.md", "config.json", "generation_config.json", "model.safetensors.index.json", "hies_plan.json"),
    *("trainer_state.json", "training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "all_results.json"),
    *("train.log", "secrets.json", "notes.txt", ".env", ".git/config", "runs/events", "checkpoint-5/tokenizer.json"),
    *("modeling_evil.py", "model.safetensors", "pytorch_model.bin", "Readme_zh.md", ".licence", "onnx/LICENSE"),
)


def files(folder: Path) -> list[str]:
    return sorted(p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file())


@pytest.fixture
def dense(tmp_path: Path) -> Path:
    for name in (*OURS, *TEMPLATES, *OTHERS):
        path = tmp_path / "dense" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"dense {name}")
    (tmp_path / "slim").mkdir()
    return tmp_path / "dense"


def test_only_files_of_a_checkpoint_come_along(dense: Path, tmp_path: Path) -> None:
    (tmp_path / "slim" / "tokenizer_config.json").write_text("written already")
    copy_companions(dense, tmp_path / "slim")
    assert files(tmp_path / "slim") == sorted((*OURS, *TEMPLATES))
    assert (tmp_path / "slim" / "tokenizer_config.json").read_text() == "written already"
    assert (tmp_path / "slim" / TEMPLATES[1]).read_text() == f"dense {TEMPLATES[1]}"


def test_links_lead_nowhere(dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "secret").write_text("token")
    (tmp_path / "templates").mkdir()
    (tmp_path / "templates" / "secret.jinja").write_text("token")
    for name, target in (("vocab.txt", tmp_path / "secret"), ("spiece.model", Path(".git", "config"))):
        (dense / name).unlink()
        (dense / name).symlink_to(target)
    (dense / "emoji.json").symlink_to(tmp_path / "nothing")
    (dense / TEMPLATES[1]).unlink()
    (dense / "additional_chat_templates").rmdir()
    (dense / "additional_chat_templates").symlink_to(tmp_path / "templates")
    copy_companions(dense, tmp_path / "slim")
    wanted = {*OURS, TEMPLATES[0]} - {"vocab.txt", "spiece.model"}
    assert files(tmp_path / "slim") == sorted(wanted)
    assert len(caplog.messages) == 3
    assert f"vocab.txt was not copied, because it is a link to {tmp_path / 'secret'};" in caplog.text


def test_a_snapshot_of_the_hub_is_links_and_comes_along(dense: Path, tmp_path: Path) -> None:
    """As a download lays it out; a link out of the repository is none of its files."""
    repository = tmp_path / "hub" / "models--someone--tiny"
    snapshot = repository / "snapshots" / "abc"
    (repository / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, name in enumerate((*OURS, *TEMPLATES)):
        (repository / "blobs" / str(number)).write_text(f"dense {name}")
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(Path("../" * (name.count("/") + 2), "blobs", str(number)))
    (snapshot / "merges.txt").symlink_to(dense / "notes.txt")
    (tmp_path / "model").symlink_to(snapshot)
    copy_companions(tmp_path / "model", tmp_path / "slim")
    assert files(tmp_path / "slim") == sorted((*OURS, *TEMPLATES))
    assert not any(path.is_symlink() for path in (tmp_path / "slim").rglob("*"))
    assert (tmp_path / "slim" / "vocab.txt").read_text() == "dense vocab.txt"


def test_only_files_of_a_checkpoint_are_fetched(hub: Hub, dense: Path, tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    for name in ("LICENSE", "spiece.model", "notes.txt", "training_args.bin"):
        shutil.copy(dense / name, tmp_path / "model")
    hub.add("org/model", {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()})
    folder = fetch_files("org/model", DOCUMENTS)
    assert files(folder) == ["LICENSE"]
    wanted = ["LICENSE", "config.json", "model.safetensors", "spiece.model", "tokenizer.json", "tokenizer_config.json"]
    for revision in (None, folder.name):
        assert fetch("org/model", revision) == folder
        assert files(folder) == wanted
    for refused in (lambda: fetch("org/none"), lambda: fetch_files("org/none", DOCUMENTS)):
        with pytest.raises(RequestError, match="org/none"):
            refused()


def test_every_tokenizer_of_transformers_is_known() -> None:
    """Read from its source, as importing all tokenizers takes long."""
    sources = Path(transformers.__file__).parent.rglob("tokenization_*.py")
    named = [re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", file.read_text(encoding="utf-8"), re.S) for file in sources]
    names = {name for found in named for entries in found for name in re.findall(r': "([^"]+)"', entries)}
    assert len(names) > 10
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in COMPANIONS)] == []
