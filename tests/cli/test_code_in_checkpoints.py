"""Code in a checkpoint is never run and never asked about, whatever command reads it and whatever is typed."""

import io
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import transformers
import yaml
from PIL import Image
from support.models import llama, llava, llava_processor, save_project, save_stories

from hies_export import RequestError

SMALL: dict[str, Any] = {
    "calibration": {"samples": 4, "batch_size": 2},
    "prune": {"alpha": 0.5, "budget": {"heads": 0.4}},
    "measure": {"shapes": [[2, 8]], "repeats": 2, "runtimes": ["torch"]},
}


def change(file: Path, **values: object) -> None:
    """Set values of a JSON file; None removes one."""
    content = (json.loads(file.read_text()) if file.is_file() else {}) | values
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def image_processor(folder: Path) -> None:
    # Where no file names a class, AutoProcessor knows LLaVA's, and forgets on the way that no code may be run.
    model = folder / "model"
    llava().save_pretrained(model)
    llava_processor().save_pretrained(model)
    (model / "processor_config.json").unlink(missing_ok=True)
    change(model / "tokenizer_config.json", processor_class=None)
    own = {"image_processor_type": "Own", "auto_map": {"AutoImageProcessor": "own.Own"}, "processor_class": None}
    change(model / "preprocessor_config.json", **own)
    Image.new("RGB", (16, 16)).save(folder / "image.png")
    (folder / "train.jsonl").write_text(json.dumps({"image": str(folder / "image.png"), "q": "Q a", "a": "yes"}))
    recipe = {
        "model": "model",
        "task": "image-text-to-text",
        "data": {"files": {"train": "train.jsonl"}, "image": "image", "prompt": "{q}", "answer": "a"},
        "evaluation": {"split": "train"},
        "output": "out",
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))


def tokenizer(folder: Path) -> None:
    save_project(folder, train=4, validation=4, **SMALL)
    llama(num_labels=2).save_pretrained(folder / "model")  # whose type does not say which class reads its tokens
    own = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": [None, "own.Own"]}}
    change(folder / "model" / "tokenizer_config.json", **own)


def config(folder: Path, *classes: str, **own: object) -> None:
    save_project(folder, train=4, validation=4, **SMALL)
    auto_map = dict.fromkeys(("AutoConfig", *classes), "own.Own")
    change(folder / "model" / "config.json", model_type="own", auto_map=auto_map, **own)


def model(folder: Path) -> None:
    config(folder, "AutoModel", "AutoModelForSequenceClassification", architectures=["Own"])


def part_of_a_model(folder: Path) -> None:
    image_processor(folder)
    llava_processor().save_pretrained(folder / "model")
    (folder / "model" / "preprocessor_config.json").unlink()
    # AutoModel has no class for this type, so it wants the one that the part of the config names.
    own = {"model_type": "git_vision_model", "auto_map": {"AutoModel": f"{folder / 'model'}--own.Own"}}
    change(folder / "model" / "config.json", vision_config=own)


def generation(folder: Path) -> None:
    save_stories(folder, lines=4, evaluation={"split": "train"}, **SMALL)
    (folder / "model" / "custom_generate").mkdir()


def transformers_loads(name: str, **options: bool) -> Callable[[Path], object]:
    return lambda folder: getattr(transformers, name).from_pretrained(folder, **options)


# Who makes the checkpoint, which class of transformers runs its code when told to, and what commands say.
TRAPS: dict[str, tuple[Callable[[Path], None], Callable[[Path], object], str]] = {
    "image processor": (image_processor, transformers_loads("AutoProcessor"), "needs code of its own (auto_map)"),
    "tokenizer": (tokenizer, transformers_loads("AutoTokenizer"), "needs code of its own (auto_map)"),
    "config": (config, transformers_loads("AutoConfig"), "must have a model_type known to transformers"),
    "model": (model, transformers_loads("AutoModel"), "needs code of its own (auto_map)"),
    "part of a model": (
        part_of_a_model,
        transformers_loads("LlavaForConditionalGeneration"),
        "a part of this one needs code of its own (auto_map)",
    ),
    "custom_generate": (generation, transformers_loads("AutoModelForCausalLM", trust_remote_code=True), ""),
}


def trapped(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Return a checkpoint with code, and the file that its code writes; who asks is answered "y"."""
    TRAPS[name][0](folder)
    checkpoint, written = folder / "model", folder / "written"
    code = f"open({str(written)!r}, 'w').close()\nclass Own: pass\ndef generate(*a, **k): pass\n"
    place = checkpoint / "custom_generate" / "generate.py" if name == "custom_generate" else checkpoint / "own.py"
    place.write_text(code)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n" * 100))
    # Where transformers keeps the classes that it has run.
    monkeypatch.setattr(transformers.AutoModel._model_mapping, "_extra_content", {})
    return checkpoint, written


@pytest.mark.usefixtures("untraced")
@pytest.mark.parametrize("name", TRAPS)
def test_no_command_runs_it_or_asks(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, told: Any) -> None:
    """At the end transformers asks, and runs it: the trap works."""

    def refuse(*_: object, **__: object) -> None:
        raise RequestError("not traced in this test")

    monkeypatch.setattr("hies_export.forms.onnx.export.export_onnx", refuse)
    checkpoint, written = trapped(name, tmp_path, monkeypatch)
    (tmp_path / "plan.json").write_text('{"kept": {}}')
    image = ["--image", tmp_path / "image.png"] if (tmp_path / "image.png").is_file() else []
    said = []
    commands = [
        ["inspect", checkpoint],
        ["run", tmp_path / "recipe.yaml"],
        ["generate", checkpoint, "--prompt", "Q a", *image, "--max-new-tokens", "2"],
    ]
    if name == "model":  # they load a model as `run` does
        commands += [
            ["apply", tmp_path / "plan.json", checkpoint, "-o", tmp_path / "applied"],
            ["export", checkpoint, "-o", tmp_path / "onnx"],
            ["bench", checkpoint, "--runtime", "torch", "--shape", "1x4", "--repeats", "2"],
        ]
    for command in commands:
        code, err, _ = told(*command)
        assert code in (0, 2), command
        said.append(err)
        assert not written.exists(), command
    assert sys.stdin.read() == "y\n" * 100
    assert any(TRAPS[name][2] in message for message in said)
    monkeypatch.setattr(sys, "stdin", io.StringIO("y\n"))
    with suppress(Exception):  # what is loaded then is no model
        TRAPS[name][1](checkpoint)
    assert written.exists()
