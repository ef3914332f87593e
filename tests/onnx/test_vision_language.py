"""A vision-language model, cut in both towers, in three ONNX graphs: by hand, by the generator and by the commands."""

import io
import json
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
import transformers
from PIL import Image
from support.cuts import random_neurons
from support.exported import TEXT, VISION, endless_llava, padded_prompts, prompt_tokenizer
from support.models import llava_processor
from support.runs import hies
from transformers import PreTrainedModel

from hies_export import bench, find_modules, load_runtime, prune_units
from hies_export.errors import DataError, ExportError, RecipeError, UnsupportedModelError
from hies_export.forms.onnx import export as export_module
from hies_export.forms.onnx.export import export_onnx
from hies_export.forms.onnx.generator import OnnxGenerator
from hies_export.forms.onnx.multimodal import image_text_batch

PARTS = ("vision_encoder.onnx", "embed_tokens.onnx", "decoder_model_merged.onnx")


def cut_in_both_towers() -> PreTrainedModel:
    """Return `endless_llava` without some heads and neurons of both towers."""
    dense = endless_llava()
    modules = find_modules(dense, image_text_batch(dense), kinds=("attention", "mlp"))
    selection = random_neurons(modules, uniform=False, seed=2)
    assert len({("vision" in m.name, m.kind) for m in modules if selection[m.name].removed}) == 4
    return prune_units(dense, selection, modules).eval()


Exported = tuple[PreTrainedModel, Path, dict[str, Any]]


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """The model, a folder with it in `model` and its export in `onnx`, and what the command printed."""
    torch.manual_seed(0)
    folder, printed = tmp_path_factory.mktemp("llava"), io.StringIO()
    model = cut_in_both_towers()
    model.save_pretrained(folder / "model")
    llava_processor(prompt_tokenizer(), patch_size=8, image_token="<image>").save_pretrained(folder / "model")
    with redirect_stdout(printed):
        assert hies("export", folder / "model", "-o", folder / "onnx", "--json") == 0
    return model, folder, json.loads(printed.getvalue().splitlines()[-1])


def test_each_part_computes_what_its_modules_do(exported: Exported) -> None:
    model, folder, summary = exported
    assert tuple(summary["files"]) == PARTS
    assert summary["inputs"][:3] == ["inputs_embeds", "attention_mask", "position_ids"]
    assert summary["onnx_max_abs"] < 1e-4
    assert summary["bytes"] == sum((folder / "onnx" / name).stat().st_size for name in PARTS)
    assert summary["bytes"] < sum(p.numel() * 4 for p in model.parameters()) + 60_000
    vision, embed = (
        onnxruntime.InferenceSession(str(folder / "onnx" / name), providers=["CPUExecutionProvider"])
        for name in PARTS[:2]
    )
    pixels = torch.randn(3, 3, 16, 16)
    with torch.no_grad():
        hidden = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states[-2][:, 1:]
        want = model.model.multi_modal_projector(hidden).numpy()
    np.testing.assert_allclose(vision.run(["image_features"], {"pixel_values": pixels.numpy()})[0], want, atol=1e-4)
    ids = torch.randint(0, 99, (3, 5))
    want = model.get_input_embeddings()(ids).detach().numpy()
    np.testing.assert_array_equal(embed.run(["inputs_embeds"], {"input_ids": ids.numpy()})[0], want)


def test_image_and_text_generate_as_in_torch(exported: Exported) -> None:
    model, folder, _ = exported
    batch = image_text_batch(model, batch=3, text=6, seed=1)
    # Rows of different length: the first keeps three tokens that the others have as padding.
    front = torch.tensor([[5, 6, 7], [0, 0, 0], [0, 0, 8]])
    batch["input_ids"] = torch.cat([front, batch["input_ids"]], dim=1)
    batch["attention_mask"] = (batch["input_ids"] != 0).long()
    generator = OnnxGenerator.from_folder(folder / "onnx")
    one = {name: tensor[:1] for name, tensor in batch.items()}
    for some in (batch, one, padded_prompts()):
        want = model.generate(**some, max_new_tokens=12, do_sample=False)
        assert generator.generate(**some, max_new_tokens=12).tolist() == want.tolist()
    other = generator.generate(**(batch | {"pixel_values": -batch["pixel_values"]}), max_new_tokens=12)
    assert other.tolist() != generator.generate(**batch, max_new_tokens=12).tolist()
    with pytest.raises(DataError, match=r"image tokens .id 99. need pixel_values, got none"):
        generator.generate(batch["input_ids"], batch["attention_mask"], max_new_tokens=12)
    with pytest.raises(DataError, match="must have 4 image tokens .id 99. per image, 8 in all, got 12"):
        generator.generate(**(batch | {"pixel_values": batch["pixel_values"][:2]}), max_new_tokens=12)


@pytest.mark.slow
def test_the_command_prompts_the_checkpoint_and_its_export_alike(
    exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, _ = exported
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (20, 24), color).save(tmp_path / f"{name}.png")
    prompts = ["--prompt", "<image> good bad fine", "--prompt", "great", "--max-new-tokens", "8", "--json"]

    def texts(source: str, *images: str) -> list[str]:
        files = [part for image in images for part in ("--image", tmp_path / f"{image}.png")]
        assert hies("generate", folder / source, *prompts, *files) == 0
        return [row["text"] for row in json.loads(capsys.readouterr().out.splitlines()[-1])["results"]]

    red, mixed = texts("onnx", "red"), texts("onnx", "red", "blue")
    assert mixed == texts("model", "red", "blue")
    assert (mixed[0], mixed[1] != red[1]) == (red[0], True)


def test_parts_are_not_timed(exported: Exported, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, folder, _ = exported
    assert hies("bench", folder / "model") == 2
    assert "is a vision-language model" in capsys.readouterr().err
    with pytest.raises(RecipeError, match="a single graph, and .* has the parts of a vision-language model"):
        bench(folder / "onnx", folder / "onnx")
    (tmp_path / PARTS[2]).write_bytes(b"")
    with pytest.raises(ExportError, match=r"must load decoder_model_merged.onnx, and refused"):
        load_runtime("onnxruntime-cpu", tmp_path / PARTS[2])


def test_images_that_cannot_be_exported_are_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module, "trace_vision_language", None)
    model = endless_llava()
    batch = image_text_batch(model)

    def refused(error: type[Exception], match: str, model: PreTrainedModel = model, **changed: object) -> None:
        with pytest.raises(error, match=match):
            export_onnx(model, tmp_path / "onnx", batch=batch | changed)

    refused(DataError, "must have 4 image tokens .id 99. per image, 8 in all, got 0", input_ids=torch.ones(2, 9).long())
    refused(DataError, "per image, 16 in all, got 8", pixel_values=torch.randn(4, 3, 16, 16))
    both = transformers.Gemma3Config(
        vision_config=transformers.SiglipVisionConfig(**VISION),
        text_config=transformers.Gemma3TextConfig(**TEXT, head_dim=8),
        **{"image_token_index": 99, "boi_token_index": 97, "eoi_token_index": 98},
    )
    gemma3 = transformers.Gemma3ForConditionalGeneration(both)
    refused(UnsupportedModelError, "Gemma3ForConditionalGeneration tells them apart by token_type_ids", model=gemma3)
    model.model.multi_modal_projector.forward = lambda states: states[0]
    refused(UnsupportedModelError, r"its projector returns shape \(4, 16\)")
    assert list(tmp_path.iterdir()) == []
