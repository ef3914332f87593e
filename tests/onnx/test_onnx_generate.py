"""The generator, the command and the timing of exported decoders."""

import json
from pathlib import Path

import onnx
import pytest
import torch
from support.exported import endless_llama, padded_prompts, prompt_tokenizer
from support.models import bert
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hies_export import OnnxGenerator, export_onnx
from hies_export.cli.main import main
from hies_export.data.processors import load_processor
from hies_export.errors import DataError, RecipeError, RequestError
from hies_export.forms.onnx.generator import encode_prompts, generate_text
from hies_export.tasks import TASKS


def tokenizer_in(folder: Path) -> PreTrainedTokenizerBase:
    return load_processor(folder, task=TASKS["text-generation"], for_prompts=True)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, Path, Path]:
    """A tiny LLaMA: the model, its checkpoint, its ONNX folder."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("decoder")
    model = endless_llama(num_hidden_layers=1, eos_token_id=2)
    model.save_pretrained(folder / "model")
    prompt_tokenizer().save_pretrained(folder / "model")
    export_onnx(model, folder / "onnx", batch=padded_prompts(), processor=prompt_tokenizer())
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

    refused("must be padded on the left", ids, torch.tensor([[1, 0, 1]]))
    refused("64 positions, got 3 and 62", ids, max_new_tokens=62)
    refused("max_new_tokens must be at least 1, got 0", ids, max_new_tokens=0, error=RecipeError)
    for wrong in (-1, generator.vocabulary):
        refused(f"must be in 0..{generator.vocabulary - 1}, got {wrong}", torch.tensor([[5, wrong]]))


def test_an_encoder_does_not_generate(tmp_path: Path) -> None:
    encoder = tmp_path / "encoder"
    bert().config.save_pretrained(encoder)
    graph = """<ir_version: 10, opset_import: ["" : 20]>
    g (int64[b, s] input_ids, int64[b, s] attention_mask) => (float[b, s] logits) { logits = Cast<to=1>(input_ids) }"""
    onnx.save(onnx.parser.parse_model(graph), encoder / "model.onnx")
    with pytest.raises(RequestError, match="takes input_ids, .*: an encoder does not generate"):
        OnnxGenerator.from_folder(encoder)


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
    # Alone and unpadded, a prompt goes on as it does in a batch.
    assert generate_text(folder, ["great"], max_new_tokens=6) == texts[1][1:]


def test_prompts_that_cannot_be_read(decoder: tuple[PreTrainedModel, Path, Path], tmp_path: Path) -> None:
    _, checkpoint, _ = decoder
    tokenizer = tokenizer_in(checkpoint)
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
        tokenizer_in(tmp_path)
    bert(num_hidden_layers=1).save_pretrained(tmp_path / "encoder")
    prompt_tokenizer().save_pretrained(tmp_path / "encoder")
    with pytest.raises(RequestError, match="must generate text to be prompted, and BertForSequenceClassification"):
        generate_text(tmp_path / "encoder", ["good"])


def test_a_tokenizer_without_a_pad_token_pads_with_its_end(tmp_path: Path) -> None:
    prompt_tokenizer(pad_token=None).save_pretrained(tmp_path)
    batch = encode_prompts(tokenizer_in(tmp_path), ["good bad fine", "great"])
    assert batch["input_ids"].tolist() == [[4, 5, 6], [2, 2, 8]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]
