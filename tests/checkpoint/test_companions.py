"""What is fetched and copied beside the weights: a tokenizer, a processor, a licence, and nothing links lead to."""

import re
import shutil
from fnmatch import fnmatch
from pathlib import Path

import pytest
import transformers
from huggingface_hub import metadata_load
from peft import LoraConfig, get_peft_model
from support.hub import Hub
from support.models import save_text_model, text_batch
from transformers import AutoModelForSequenceClassification

from hies_export import find_modules, load, prune
from hies_export.checkpoint.beside import (
    CARD,
    COMPANIONS,
    DOCUMENTS,
    MODULES_FILE,
    copy_companions,
    copy_documents,
    documents_of,
    fetch,
    fetch_whole,
    write_card,
)
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


def test_only_files_of_a_checkpoint_are_fetched_and_copied_out_of_the_cache(
    hub: Hub, dense: Path, tmp_path: Path
) -> None:
    """A download is links to the blobs of its repository."""
    save_text_model(tmp_path / "model")
    given = {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()}
    added = ("LICENSE", "spiece.model", TEMPLATES[1], "notes.txt", "training_args.bin")
    hub.add("org/model", given | {name: (dense / name).read_bytes() for name in added})
    folder = fetch("org/model", DOCUMENTS)
    assert files(folder) == ["LICENSE"]
    companions = sorted(("LICENSE", "spiece.model", TEMPLATES[1], "tokenizer.json", "tokenizer_config.json"))
    for revision in (None, folder.name):
        assert fetch("org/model", revision=revision) == folder
        assert files(folder) == sorted((*companions, "config.json"))
    for revision in (None, folder.name):
        assert fetch_whole("org/model", revision=revision) == folder
        assert files(folder) == sorted((*companions, "config.json", "model.safetensors"))
    for refused in (lambda: fetch("org/none"), lambda: fetch_whole("org/none")):
        with pytest.raises(RequestError, match="org/none"):
            refused()

    assert (folder / "LICENSE").is_symlink()
    (tmp_path / "linked").symlink_to(folder)
    copy_companions(tmp_path / "linked", tmp_path / "slim")
    assert files(tmp_path / "slim") == companions
    assert not any(path.is_symlink() for path in (tmp_path / "slim").rglob("*"))
    assert (tmp_path / "slim" / TEMPLATES[1]).read_text() == f"dense {TEMPLATES[1]}"


def test_every_tokenizer_of_transformers_is_known() -> None:
    """Read from its source, as importing all tokenizers takes long."""
    sources = Path(transformers.__file__).parent.rglob("tokenization_*.py")
    named = [re.findall(r"VOCAB_FILES_NAMES = \{(.*?)\}", file.read_text(encoding="utf-8"), re.S) for file in sources]
    names = {name for found in named for entries in found for name in re.findall(r': "([^"]+)"', entries)}
    assert len(names) > 10
    assert [name for name in names if not any(fnmatch(name, pattern) for pattern in COMPANIONS)] == []


def test_the_licence_of_a_model_in_memory_is_that_of_where_it_was_loaded(hub: Hub, dense: Path, tmp_path: Path) -> None:
    save_text_model(tmp_path / "model")
    for name in ("MODEL_LICENSE", "Notice.txt", "training_args.bin"):
        shutil.copy(dense / name, tmp_path / "model")
    (tmp_path / "model" / "README.md").write_text("---\nlicense: other\nlicense_link: MODEL_LICENSE\n---\n# Dense\n")
    hub.add("org/model", {file.name: file.read_bytes() for file in (tmp_path / "model").iterdir()})
    for number, source in enumerate((str(tmp_path / "model"), "org/model")):
        model = AutoModelForSequenceClassification.from_pretrained(source)
        copied = tmp_path / f"beside-{number}"
        copied.mkdir()
        copy_documents(model, copied)
        assert files(copied) == ["MODEL_LICENSE", "Notice.txt"]
    slim = tmp_path / "cut"
    prune(model, [text_batch(labels=False)], budget={"heads": 0.5}, criterion="random").save_pretrained(slim)
    assert {*files(slim)} >= {"MODEL_LICENSE", "Notice.txt"}
    assert not {"training_args.bin", "tokenizer.json"} & {*files(slim)}
    card = metadata_load(slim / "README.md")
    assert (card["license"], card["license_link"]) == ("other", "MODEL_LICENSE")
    shutil.rmtree(tmp_path / "model")
    model.config.name_or_path = str(tmp_path / "model")
    assert documents_of(model) is None


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft asks for it
def test_adapters_are_refused(hub: Hub, tmp_path: Path) -> None:
    """Beside weights, transformers loads one only where peft is installed; of a model that has one, it saves that."""
    save_text_model(tmp_path / "model")
    layers = LoraConfig(target_modules=["query"])
    adapted = get_peft_model(AutoModelForSequenceClassification.from_pretrained(tmp_path / "model"), layers)
    adapted.save_pretrained(tmp_path / "adapter")
    (tmp_path / "adapter" / "README.md").unlink()
    for name in ("adapter", "model"):
        if name == "model":
            for file in (tmp_path / "adapter").iterdir():
                shutil.copy(file, tmp_path / "model")
        hub.add(f"org/{name}", {file.name: file.read_bytes() for file in (tmp_path / name).iterdir()})
        what = "is an adapter without its model" if name == "adapter" else "has an adapter .* beside its weights"
        for source in (tmp_path / name, f"org/{name}"):
            with pytest.raises(RequestError, match=f"{name}.* {what}; merge the adapter first"):
                load(source)
    inner = adapted.get_base_model()
    for use in (lambda: prune(inner, [text_batch()], budget={"heads": 0.5}), lambda: find_modules(inner, text_batch())):
        with pytest.raises(RequestError, match="self.query has an adapter .*merge_and_unload"):
            use()
    with pytest.raises(RequestError, match="but it has an adapter .PeftModel.* give what merge_and_unload"):
        prune(adapted, [text_batch()], budget={"heads": 0.5})
    assert find_modules(adapted.merge_and_unload(), text_batch())


@pytest.mark.parametrize("library", ["transformers", "sentence-transformers"])
def test_a_card_names_the_library_that_loads_the_folder(library: str, tmp_path: Path) -> None:
    if library == "sentence-transformers":
        (tmp_path / MODULES_FILE).write_text("[]")
    source = tmp_path / "dense"
    source.mkdir()
    write_card(tmp_path, source)
    assert not (tmp_path / CARD).exists()
    (source / CARD).write_text("---\nlicense: mit\n---\n# Dense\n")
    write_card(tmp_path, source)
    card = metadata_load(tmp_path / CARD)
    assert (card["library_name"], card["license"]) == (library, "mit")
