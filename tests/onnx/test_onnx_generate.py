"""The generator, the command and the timing of exported decoders."""

import json
from pathlib import Path

import onnx
import pytest
import tokenizers
import torch
from PIL import Image
from support.cuts import random_cut
from support.exported import endless_llama, endless_llava, padded_prompts
from support.models import WORDS, bert
from transformers import (
    AutoTokenizer,
    CLIPImageProcessorPil,
    LlavaProcessor,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from hies_export import OnnxGenerator, bench, export_onnx, load_runtime
from hies_export.cli.main import main
from hies_export.data.processors import load_processor
from hies_export.errors import DataError, ExportError, RecipeError, RequestError
from hies_export.forms.onnx.generator import encode_prompts, generate_text
from hies_export.forms.onnx.multimodal import image_text_batch
from hies_export.tasks import TASKS


def prompt_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    return load_processor(folder, task=TASKS["text-generation"], for_prompts=True)


def save_tokenizer(folder: Path, *, pad: bool = True) -> PreTrainedTokenizerFast:
    """Ten words, and an image token with the id that the tiny LLaVA expects."""
    names = ["<pad>", "<s>", "</s>", "<unk>", *WORDS]
    names += [f"w{i}" for i in range(len(names), 99)] + ["<image>"]
    vocabulary = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    tokenizer = tokenizers.Tokenizer(vocabulary)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>" if pad else None,
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=["<image>"],
    )
    fast.save_pretrained(folder)
    return fast


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, Path]:
    """A tiny LLaMA: the model, its checkpoint, its ONNX folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("decoder")
    model = endless_llama(num_hidden_layers=1, eos_token_id=2)
    model.save_pretrained(folder / "model")
    save_tokenizer(folder / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    export_onnx(model, folder / "onnx", batch=padded_prompts(), processor=tokenizer)
    return model, folder / "model", folder / "onnx"


def test_a_row_that_ends_goes_on_with_padding(decoder: tuple[PreTrainedModel, Path, Path]) -> None:
    model, _, folder = decoder
    batch = padded_prompts()
    free = model.generate(**batch, max_new_tokens=10, do_sample=False, eos_token_id=[98])
    # What one row says third ends it; the others say it at another time, or never.
    ends = [int(free[0, batch["input_ids"].shape[1] + 2])]
    want = model.generate(**batch, max_new_tokens=10, do_sample=False, eos_token_id=ends)
    assert (want[0, -3:] == 0).all()
    generator = OnnxGenerator.from_folder(folder)
    assert generator.eos_token_ids == (2,)
    got = generator.generate(**batch, max_new_tokens=10, eos_token_id=ends)
    assert got.tolist() == want.tolist()
    one = {name: tensor[:1] for name, tensor in batch.items()}
    stopped = generator.generate(**one, max_new_tokens=10, eos_token_id=ends[0])
    new = free[0, batch["input_ids"].shape[1] :].tolist()
    assert stopped[0, batch["input_ids"].shape[1] :].tolist() == new[: new.index(ends[0]) + 1]


def test_wrong_prompts(decoder: tuple[PreTrainedModel, Path, Path]) -> None:
    generator = OnnxGenerator.from_folder(decoder[2])
    ids = torch.tensor([[5, 6, 7]])

    def refused(match: str, *args: object, error: type[Exception] = DataError, **options: object) -> None:
        with pytest.raises(error, match=match):
            generator.generate(*args, **options)

    refused("must be padded on the left", ids, torch.tensor([[1, 1, 0]]))
    refused("must be padded on the left", ids, torch.tensor([[1, 0, 1]]))
    refused("64 positions, got 3 and 62", ids, max_new_tokens=62)
    refused("max_new_tokens must be at least 1, got 0", ids, max_new_tokens=0, error=RecipeError)
    for wrong in (-1, generator.vocabulary):
        refused(f"must be in 0..{generator.vocabulary - 1}, got {wrong}", torch.tensor([[5, wrong]]))


def test_wrong_folders(tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    bert().config.save_pretrained(encoder)
    graph = """<ir_version: 10, opset_import: ["" : 20]>
    g (int64[b, s] input_ids, int64[b, s] attention_mask) => (float[b, s] logits) { logits = Cast<to=1>(input_ids) }"""
    onnx.save(onnx.parser.parse_model(graph), encoder / "model.onnx")
    with pytest.raises(RequestError, match="takes input_ids, .*: an encoder does not generate"):
        OnnxGenerator.from_folder(encoder)
    (encoder / "decoder_model_merged.onnx").write_bytes(b"")
    with pytest.raises(RecipeError, match="a single graph, and .* has the parts of a vision-language model"):
        bench(encoder, encoder)
    with pytest.raises(ExportError, match="must load decoder_model_merged.onnx, and refused"):
        load_runtime("onnxruntime-cpu", encoder / "decoder_model_merged.onnx")


def test_a_decoder_prefills_alike_in_both_runtimes(decoder: tuple[PreTrainedModel, Path, Path]) -> None:
    model, _, folder = decoder
    model.config.use_cache = False
    batch = padded_prompts()
    outputs = []
    for runtime in (load_runtime("torch", model), load_runtime("onnxruntime-cpu", folder)):
        outputs.append(runtime.fetch(runtime.run(runtime.prepare(batch))))
    want, got = outputs
    assert {name: array.shape for name, array in want.items()} == {name: array.shape for name, array in got.items()}
    assert want["present.0.value"].shape == (3, 3, 9, 8)
    real = batch["attention_mask"].bool().numpy()
    assert abs(want["logits"] - got["logits"])[real].max() < 1e-4
    rows = bench(folder, folder, shapes=[(2, 8)], repeats=6)
    assert [(row.runtime, row.phase) for row in rows] == [
        *(("onnxruntime-cpu", "prefill"), ("onnxruntime-cpu", "decode"))
    ]
    assert rows[1].dense_ms > 0


def test_the_command_continues_prompts_as_the_checkpoint_does(
    decoder: tuple[PreTrainedModel, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    _, checkpoint, folder = decoder
    options = ["--prompt", "good bad fine", "--prompt", "great", "--max-new-tokens", "6", "--json"]
    texts = []
    for source in (checkpoint, folder):
        assert main(["generate", str(source), *options]) == 0
        results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
        assert [row["prompt"] for row in results] == ["good bad fine", "great"]
        texts.append([row["text"] for row in results])
    assert texts[0] == texts[1]
    assert all(len(text.split()) >= 1 for text in texts[1])
    # Alone and unpadded, a prompt goes on as it does in a batch.
    assert generate_text(folder, ["great"], max_new_tokens=6) == texts[1][1:]


@pytest.mark.slow
def test_the_commands_export_and_prompt_an_uneven_vision_language_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = endless_llava()
    model, plan, _ = random_cut(dense, image_text_batch(dense, batch=2))
    assert len({len(kept.units) for kept in plan.kept.values()}) > 1
    model.save_pretrained(tmp_path / "model")
    crop = {"height": 16, "width": 16}
    LlavaProcessor(
        image_processor=CLIPImageProcessorPil(size=crop, crop_size=crop),
        tokenizer=save_tokenizer(tmp_path / "model"),
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        image_token="<image>",
    ).save_pretrained(tmp_path / "model")
    assert main(["export", str(tmp_path / "model"), "-o", str(tmp_path / "onnx")]) == 0
    for name, color in (("red", (255, 0, 0)), ("blue", (0, 0, 255))):
        Image.new("RGB", (20, 24), color).save(tmp_path / f"{name}.png")
    prompts = ["--prompt", "<image> good bad fine", "--prompt", "great", "--max-new-tokens", "8", "--json"]
    texts = {}
    for images in (("red", "red"), ("red", "blue"), ("red",)):
        files = [part for image in images for part in ("--image", str(tmp_path / f"{image}.png"))]
        for source in ("model", "onnx"):
            assert main(["generate", str(tmp_path / source), *prompts, *files]) == 0
            results = json.loads(capsys.readouterr().out.splitlines()[-1])["results"]
            texts[source, images] = [row["text"] for row in results]
        assert texts["model", images] == texts["onnx", images]
    assert texts["onnx", ("red",)] == texts["onnx", ("red", "red")]
    assert texts["onnx", ("red", "blue")][1] != texts["onnx", ("red", "red")][1]
    generator = OnnxGenerator.from_folder(tmp_path / "onnx")
    batch = image_text_batch(model, batch=2)
    with pytest.raises(DataError, match=r"image tokens .id 99. need pixel_values, got none"):
        generator.generate(batch["input_ids"])
    with pytest.raises(DataError, match="must have 4 image tokens .id 99. per image, 4 in all, got 8"):
        generator.generate(batch["input_ids"], pixel_values=batch["pixel_values"][:1])
    assert main(["bench", str(tmp_path / "model")]) == 2
    assert "is a vision-language model" in capsys.readouterr().err


def test_prompts_that_cannot_be_read(decoder: tuple[PreTrainedModel, Path, Path], tmp_path: Path) -> None:
    _, checkpoint, _ = decoder
    tokenizer = prompt_tokenizer(checkpoint)
    with pytest.raises(DataError, match="at least one prompt is needed"):
        encode_prompts(tokenizer, [])
    with pytest.raises(DataError, match="at least one token, got ''"):
        encode_prompts(tokenizer, ["good", ""])
    with pytest.raises(DataError, match="one for all prompts or one for each of 3, got 2"):
        encode_prompts(tokenizer, ["good"] * 3, [tmp_path, tmp_path])
    (tmp_path / "broken.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"must be a file that Pillow decodes, and .*broken\.png is not"):
        encode_prompts(tokenizer, ["good"], [tmp_path / "broken.png"])
    with pytest.raises(DataError, match="prompts need a tokenizer, but none could be loaded"):
        prompt_tokenizer(tmp_path)
    bert().save_pretrained(tmp_path / "encoder")
    save_tokenizer(tmp_path / "encoder")
    with pytest.raises(RequestError, match="must generate text to be prompted, and BertForSequenceClassification"):
        generate_text(tmp_path / "encoder", ["good"])


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path: Path) -> None:
    save_tokenizer(tmp_path, pad=False)
    batch = encode_prompts(prompt_tokenizer(tmp_path), ["good bad fine", "great"])
    assert batch["input_ids"].tolist() == [[4, 5, 6], [2, 2, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
