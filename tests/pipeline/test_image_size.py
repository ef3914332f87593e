"""Images of another size than the config's: that of the rows counts everywhere, and without rows the processor's."""

import json
from pathlib import Path

import numpy as np
import onnx
import PIL.Image
import pytest
from support.loading import load_pruning
from support.models import shake, write_recipe
from support.runs import hies
from transformers import Dinov2Config, Dinov2ForImageClassification
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil

from hies_export import DataError, PruningRecipe, Report, RequestError
from hies_export.pipeline.load_recipe import load_recipe

# Patches of 14 x 14 in a picture of 28 x 42, and the token of the class.
TOKENS = 1 + 2 * 3
CROP = {"size": {"shortest_edge": 42}, "crop_size": {"height": 28, "width": 42}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A DINOv2 whose config says 112 x 112, a processor that crops, and pictures of three classes."""
    folder = tmp_path_factory.mktemp("images")
    sizes = {"image_size": 112, "patch_size": 14, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = Dinov2Config(**sizes, mlp_ratio=2, num_labels=3)
    shake(Dinov2ForImageClassification(config)).save_pretrained(folder / "model")
    BitImageProcessorPil(**CROP).save_pretrained(folder / "model")
    draw = np.random.default_rng(0)
    for split in ("train", "validation"):
        for name in "abc":
            (folder / split / name).mkdir(parents=True)
            for number in range(4):
                pixels = draw.integers(0, 255, (50, 60, 3), dtype="uint8")
                PIL.Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
    write_recipe(
        folder,
        "image-classification",
        data={"files": {"train": "train", "validation": "validation"}, "image": "image", "label": "label"},
        calibration={"samples": 8, "batch_size": 8},
        prune={"budget": {"heads": 0.25}},
        measure={"runtimes": ["onnxruntime-cpu"], "shapes": [[2]], "repeats": 2},
    )
    return folder


def traced(folder: Path) -> list[int]:
    graph = onnx.load(folder / "model.onnx").graph
    return [dim.dim_value for dim in graph.input[0].type.tensor_type.shape.dim][1:]


@pytest.mark.usefixtures("untraced")
def test_runs_count_time_and_export_images_of_the_rows_size(folder: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(
        folder / "recipe.yaml", {"measure.runtimes": ["torch"], "output": str(tmp_path / "out")}
    )
    recipe.run()
    report = Report.from_file(tmp_path / "out")
    assert tuple(report.flops.shape) == (2, TOKENS)
    assert {(row.batch, row.sequence) for row in report.latency} == {(2, TOKENS)}
    # The graph is traced with these, and the next test sees that it then has their size.
    pruning, delivery = load_recipe(recipe)
    for sample in (pruning.sample, delivery.exporter.given.sample):
        assert sample["pixel_values"].shape[1:] == (3, 28, 42)


def test_without_rows_the_processor_says_it(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert hies("export", folder / "model", "-o", tmp_path / "onnx", "--json") == 0
    exported = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (exported["inputs"], exported["onnx_max_abs"] < 1e-3) == (["pixel_values"], True)
    assert traced(tmp_path / "onnx") == [3, 28, 42]
    shape = ("--shape", "2", "--repeats", 2, "--runtime", "onnxruntime-cpu", "--json")
    assert hies("bench", folder / "model", tmp_path / "onnx", *shape) == 0
    (row,) = json.loads(capsys.readouterr().out.splitlines()[-1])["latency"]
    assert (row["batch"], row["sequence"]) == (2, TOKENS)
    config = folder / "model" / "preprocessor_config.json"
    other = tmp_path / "other"
    Dinov2ForImageClassification.from_pretrained(folder / "model").save_pretrained(other)
    (other / config.name).write_text(config.read_text().replace("42", "28"))
    assert hies("bench", folder / "model", other, "--shape", "2") == 2
    assert "got images of 3 x 28 x 42 and images of 3 x 28 x 28" in capsys.readouterr().err


def test_all_images_must_become_one_size(folder: Path, tmp_path: Path) -> None:
    recipe = PruningRecipe.from_yaml(folder / "recipe.yaml", {"output": str(tmp_path / "out")})
    wide = tmp_path / "validation" / "a"
    wide.mkdir(parents=True)
    for number in range(4):
        PIL.Image.new("RGB", (90, 50)).save(wide / f"{number}.png")
    model = tmp_path / "model"
    Dinov2ForImageClassification.from_pretrained(folder / "model").save_pretrained(model)
    BitImageProcessorPil(size={"shortest_edge": 28}, do_center_crop=False).save_pretrained(model)
    asked = recipe.with_overrides({"model": str(model)})
    assert {batch["pixel_values"].shape[1:] for batch in load_pruning(asked).rows.evaluation} == {(3, 28, 33)}
    files = {"train": folder / "train", "validation": tmp_path / "validation"}
    with pytest.raises((DataError, RequestError), match="make all images of one size, got 3 x 28 x 33 and 3 x 28 x 50"):
        load_pruning(asked.with_overrides({"data.files": files, "data.label": None}))
