"""Checks and batches against values worked out by hand."""

import io
import json
import logging
import re
from unittest.mock import Mock

import datasets
import numpy as np
import PIL.ExifTags
import PIL.Image
import pytest
import tokenizers
import torch
import transformers
from support.models import save_text_model, word_tokenizer
from support.reading import reading
from transformers import BertConfig, DistilBertConfig, LlamaConfig, RobertaConfig, ViTConfig, ViTImageProcessorPil

from hies_export.data.batches import batches_fingerprint
from hies_export.data.columns import as_images, image_of_file, image_of_row
from hies_export.data.processors import load_processor, settle_padding
from hies_export.data.rows import load_rows
from hies_export.errors import DataError, RequestError
from hies_export.recipe.sections import Columns
from hies_export.tasks import TASKS


def rows_of(columns, features=None):
    return datasets.Dataset.from_dict(columns, features=features)


TEXT = Columns(text=("text",), label="label")


def check(rows, config, columns=TEXT, task="text-classification"):
    TASKS[task](config).to_read(columns).check_rows(rows)


def named_config(**numbers):
    return BertConfig(label2id=numbers, id2label={number: name for name, number in numbers.items()})


def classes_named(id2label, label2id=None):
    config = BertConfig()
    config.id2label, config.label2id = id2label, label2id
    return config


ONE = {"text": ["a"], "label": [0], "numbers": [[1, 2]]}
IMAGE = {"columns": Columns(image="image"), "config": ViTConfig(), "task": "image-classification"}
CLASSES = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["n", "y"])})


def of_labels(*labels):
    return {"text": ["a"] * len(labels), "label": list(labels)}


def classes(number, **options):
    return {"config": BertConfig(num_labels=number, **options)}


@pytest.mark.parametrize(
    ("columns", "read", "match"),
    [
        (ONE, {"columns": Columns(text=("sentence",))}, r"the column 'sentence', but it has text, label, numbers"),
        (ONE, {"columns": Columns(text=("label",))}, "'label' must hold text, but it holds int64"),
        (ONE, IMAGE | {"columns": Columns(image="text")}, "'text' must hold images, but it holds string"),
        (ONE, IMAGE | {"columns": TEXT}, r"needs data\.image .* and no data\.text"),
        (of_labels(-1.0, -1.0), classes(1), r"got -1 in every row .* hidden label"),
        (of_labels(0.0, 1.0), {}, r"class names, but 'label' holds float64 such as 0\.0; a gap"),
        (of_labels(0.5, float("nan")), classes(1), r"must have a label, but row 1 \(from 0\) has nan"),
        (of_labels("a", "b"), classes(1), "a regression must be a number, but row 0 .* has 'a'"),
        (of_labels("yes", "no"), {}, r"must be among the model's \(LABEL_0, LABEL_1\), got 'yes', 'no'"),
        (rows_of(of_labels(1), CLASSES), classes(1), "a regression must be a number and no class"),
        (of_labels("US", "Us"), {"config": named_config(us=0, US=1)}, "'Us' is the name of classes 0, 1 in"),
        (
            of_labels(0, 1),
            {"config": named_config(**{"1": 0, "2": 1})},
            r"model's \(1, 2\), got '0'; rename them, or leave",
        ),
        (of_labels([0], [1]), {}, r"holds List such as \[0\]"),
    ],
)
def test_check_refuses_what_the_model_cannot_be_fed_with(columns, read, match):
    rows = columns if isinstance(columns, datasets.Dataset) else rows_of(columns)
    with pytest.raises(DataError, match=match):
        check(rows, **(classes(2) | read))


@pytest.mark.parametrize("id2label", [{0: "a", 2: "b"}, {}])
def test_every_class_must_have_a_name(id2label):
    match = f"id2label must name every class, numbered from 0 without a gap, but it has {id2label}"
    with pytest.raises(RequestError, match=match):
        check(rows_of(of_labels(0, 0)), classes_named(id2label, {"a": 0, "b": 1}))


def letters(**options):
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return word_tokenizer("abcdefgh", **({"eos_token": "[SEP]", "model_input_names": names} | options))


def text_batches(rows, config, columns=TEXT, tokenizer=None, batch_size=2, **options):
    options |= {"config": config, "processor": tokenizer or letters()}
    reader = reading("text-classification", columns=columns, **options)
    reader.check_rows(rows)
    return reader.read(reader.draw(rows), size=batch_size)


def test_batches_are_padded_to_their_own_longest_and_keep_the_order():
    rows = rows_of({"text": ["a b", "c", "d e f g"], "label": [0, 1, 1]})
    first, second = text_batches(rows, BertConfig(num_labels=2))
    assert first["input_ids"].tolist() == [[2, 4, 5, 3], [2, 6, 3, 0]]
    assert first["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert second["input_ids"].tolist() == [[2, 7, 8, 9, 10, 3]]
    assert first["labels"].tolist() == [0, 1]
    assert first["labels"].dtype == torch.int64
    assert second["labels"].tolist() == [1]


def test_pairs_and_regression_labels():
    """-1 stands for a hidden label only where all scores are -1."""
    rows = rows_of({"one": ["a", "b"], "two": ["c d", "e"], "label": [-1, 2.5]})
    (batch,) = text_batches(rows, BertConfig(num_labels=1), Columns(text=("one", "two"), label="label"))
    assert batch["input_ids"].tolist() == [[2, 4, 3, 6, 7, 3], [2, 5, 3, 8, 3, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 0, 1, 1, 1], [0, 0, 0, 1, 1, 0]]
    assert batch["labels"].dtype == torch.float32
    assert batch["labels"].tolist() == [-1.0, 2.5]


@pytest.mark.parametrize("config", [BertConfig(), DistilBertConfig(), RobertaConfig(type_vocab_size=1)])
def test_labels_and_segment_ids_are_left_out_where_there_are_none(config):
    (batch,) = text_batches(rows_of({"text": ["a"]}), config, Columns(text=("text",)))
    segments = {"token_type_ids"} if type(config) is BertConfig else set()
    assert set(batch) == {"input_ids", "attention_mask"} | segments


@pytest.mark.parametrize(
    ("positions", "model_max_length", "max_length", "length"),
    [(6, 1000, None, 6), (60, 5.0, None, 5), (60, None, None, 10), (60, 8, 4, 4)],
)
def test_length_limit(positions, model_max_length, max_length, length):
    tokenizer = letters(**({} if model_max_length is None else {"model_max_length": model_max_length}))
    rows, config = rows_of({"text": ["a b c d e f g h"]}), BertConfig(max_position_embeddings=positions)
    (batch,) = text_batches(rows, config, Columns(text=("text",)), tokenizer, max_length=max_length)
    assert batch["input_ids"].shape == (1, length)


@pytest.mark.parametrize(
    ("text", "config", "tokens", "options", "match"),
    [
        ("a", BertConfig(max_position_embeddings=6), {}, {"max_length": 0}, r"max_length must be in \[1, 6\].*got 0"),
        ("a", BertConfig(max_position_embeddings=6), {}, {"max_length": 7}, r"max_length must be in \[1, 6\].*got 7"),
        ("a", LlamaConfig(), dict.fromkeys(("pad_token", "eos_token", "unk_token")), {}, "neither a padding nor"),
        ("h", BertConfig(vocab_size=8), {}, {}, "gives the token 11 and the model knows 8 tokens"),
    ],
)
def test_what_no_batch_can_be_made_of_is_refused(text, config, tokens, options, match):
    with pytest.raises(DataError, match=match):
        text_batches(rows_of({"text": [text]}), config, Columns(text=("text",)), letters(**tokens), **options)


def test_a_tokenizer_that_cannot_read_a_word_is_refused():
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="[gone]"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="a")
    with pytest.raises(DataError, match="the tokenizer must read every text, but fails: .*[Mm]issing .*; correct its"):
        text_batches(rows_of({"text": ["unknown"]}), BertConfig(), Columns(text=("text",)), tokenizer)


@pytest.mark.parametrize(
    ("named", "tokens", "token"),
    [
        (9, {}, 9),  # where the tokenizer has 0
        (40, {"pad_token": None}, 40),  # the tokenizer has no 40
        *((unknown, {}, 0) for unknown in (-1, 50, None)),
        # [SEP], which is the end-of-text token, ends every text.
        (None, {"pad_token": None}, 1),
    ],
)
def test_the_config_says_what_pads_texts_or_else_the_tokenizer_and_both_stay(named, tokens, token):
    tokenizer, config = letters(**tokens), LlamaConfig(vocab_size=50)
    config.pad_token_id = named
    before = tokenizer.backend_tokenizer.to_str(), tokenizer.pad_token, config.to_dict()
    (batch,) = text_batches(rows_of({"text": ["a b", "c"]}), config, Columns(text=("text",)), tokenizer, max_length=4)
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1], [1, 1, 1, 0]]
    assert batch["input_ids"][1, -1] == token
    assert (tokenizer.backend_tokenizer.to_str(), tokenizer.pad_token, config.to_dict()) == before


CAUSAL = {"vocab_size": 64, "max_position_embeddings": 64, "num_labels": 3}
SMALL = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize(
    ("family", "pad", "ending"),
    [
        *(("Llama", 0, ""), ("Llama", 40, "[SEP]"), ("Llama", None, "[SEP]")),
        *(("GPT2", 3, "[SEP]"), ("Roberta", 3, "[SEP]"), ("Roberta", 40, "")),
    ],
)
def test_a_padded_text_is_classified_as_it_is_alone(family, pad, side, ending):
    """The tokenizer pads with 0; with None, the model takes a text alone, as it reads the last token of all."""
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2} if family == "GPT2" else SMALL
    config = getattr(transformers, f"{family}Config")(**CAUSAL, **sizes, pad_token_id=pad, initializer_range=0.5)
    model = getattr(transformers, f"{family}ForSequenceClassification")(config).eval()
    texts, tokenizer = ["a b", "c d e f g h a", "h", "d b a c"], letters(padding_side=side)
    tokenizer.backend_tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"$A {ending}".strip(), special_tokens=[("[SEP]", 3)]
    )
    with torch.no_grad():
        alone = torch.cat([model(input_ids=torch.tensor([tokenizer(text)["input_ids"]])).logits for text in texts])
        settle_padding(model, tokenizer)
        (batch,) = text_batches(rows_of({"text": texts}), config, Columns(text=("text",)), tokenizer, batch_size=4)
        torch.testing.assert_close(model(**batch).logits, alone)


def test_a_config_gets_a_padding_token_only_where_the_model_needs_it(caplog):
    model = transformers.LlamaForSequenceClassification(LlamaConfig(**CAUSAL, **SMALL))
    with caplog.at_level(logging.WARNING, logger="hies_export"):
        settle_padding(model, letters())
    assert model.config.pad_token_id == 0
    assert "no pad_token_id: it is set to 0" in caplog.text
    model.config.pad_token_id = None
    with pytest.raises(DataError, match=r"not be the token that the tokenizer ends texts with, 3, and it has no other"):
        settle_padding(model, letters(pad_token="[SEP]", unk_token=None))
    generates = transformers.LlamaForCausalLM(LlamaConfig(**CAUSAL, **SMALL))
    settle_padding(generates, letters())
    assert generates.config.pad_token_id is None


def labels_of(labels, config, names=None):
    feature = datasets.ClassLabel(names=names) if names else None
    features = datasets.Features({"text": datasets.Value("string"), "label": feature}) if names else None
    rows = rows_of({"text": ["a"] * len(labels), "label": labels}, features)
    return [label for batch in text_batches(rows, config) for label in batch["labels"].tolist()]


NAMED = {0: "bad", 1: "good"}
CRANES = {0: "crane", 1: "crow", 2: "crane"}  # ImageNet has two classes of this name


@pytest.mark.parametrize(
    ("id2label", "labels", "names", "expected"),
    [
        ({1: "NEGATIVE", 0: "POSITIVE"}, ["POSITIVE", "negative", "NEGATIVE"], None, [0, 1, 1]),
        ({1: "NEGATIVE", 0: "POSITIVE"}, [0, 1, 1], ["Negative", "Positive"], [1, 0, 0]),
        ({"0": "bad", "1": "good"}, ["good", "bad"], None, [1, 0]),
        (NAMED, [0, 1, 1], None, [0, 1, 1]),
        (NAMED, [2, 0], ["good", "so-so", "bad"], [0, 1]),
        # The exact name wins over one that differs in case, and the data may have some of the classes only.
        ({0: "us", 1: "US"}, ["US", "us"], None, [1, 0]),
        ({0: "bird", 1: "cat", 2: "dog"}, [0, 1], ["cat", "dog"], [1, 2]),
        ({0: "True", 1: "False"}, [True, False], None, [0, 1]),
        # Ratings are no class numbers.
        ({0: "1", 1: "2", 2: "3"}, [3, 1], None, [2, 0]),
        ({0: "0", 1: "1"}, [1, 0], None, [1, 0]),
        (CRANES, ["crow"], None, [1]),
        (CRANES, [1, 0], ["crane", "crow"], [1, 0]),
    ],
)
@pytest.mark.parametrize("label2id", [None, {"bad": 1, "good": 0}], ids=["no label2id", "another label2id"])
def test_labels_are_matched_by_the_names_that_id2label_and_the_data_know(id2label, labels, names, expected, label2id):
    assert labels_of(labels, classes_named(id2label, label2id), names=names) == expected


def test_other_class_names_are_matched_by_number(caplog):
    with caplog.at_level(logging.WARNING, logger="hies_export"):
        assert labels_of([0, 1], BertConfig(num_labels=2), names=["no", "yes"]) == [0, 1]
        assert labels_of([4, 1], BertConfig(num_labels=5), names=["0", "1", "2", "3", "10"]) == [4, 1]
        assert caplog.text == ""
        assert labels_of([0, 1], named_config(bad=0, good=1), names=["no", "yes"]) == [0, 1]
    assert "(no, yes) are not named as the model's (bad, good): they are matched by number" in caplog.text
    assert labels_of([True, False], named_config(bad=0, good=1)) == [1, 0]
    assert "(False, True) are not named as the model's (bad, good)" in caplog.text


@pytest.mark.parametrize(
    ("classes", "names", "match"),
    [
        (3, ["no", "yes"], r"the 2 classes of 'label' \(no, yes\) must have names of the model's 3 .* or be as many"),
        (5, ["0", "1", "10", "2", "3"], "in the order of their numbers: as text, 10 comes before 2"),
        (2, ["10", "9"], "in the order of their numbers: as text, 10 comes before 9"),
    ],
)
def test_other_class_names_must_be_as_many_as_the_models_and_in_its_order(classes, names, match):
    with pytest.raises(DataError, match=match):
        labels_of([0, 1], BertConfig(num_labels=classes), names=names)


def image_batches(rows, *, batch_size=8, label=None, size=4):
    how = {"config": ViTConfig(num_labels=2), "processor": ViTImageProcessorPil(size={"height": size, "width": size})}
    reader = reading("image-classification", columns=Columns(image="image", label=label), **how)
    reader.check_rows(rows)
    return reader.read(reader.draw(rows), size=batch_size)


def encoded(image, format="PNG"):
    out = io.BytesIO()
    image.save(out, format=format)
    return out.getvalue()


def picture(mode="RGB"):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 4, 3), dtype=np.uint8)
    return PIL.Image.fromarray(pixels).convert(mode)


def expected_pixels(image):
    """The ViT's default normalisation, mean and deviation 0.5, by hand."""
    return torch.tensor(np.asarray(image.convert("RGB"))).permute(2, 0, 1) / 127.5 - 1


def test_images_are_read_from_every_storage(tmp_path):
    content = encoded(picture("P"))
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "a.png").write_bytes(content)
    for rows in (
        rows_of({"image": [content]}),
        rows_of({"image": [{"bytes": content, "path": None}]}),
        rows_of({"image": [picture("P")]}, datasets.Features({"image": datasets.Image()})),
        load_rows(files={"only": tmp_path}, split="only"),
    ):
        (batch,) = image_batches(rows)
        assert set(batch) == {"pixel_values"}
        torch.testing.assert_close(batch["pixel_values"][0], expected_pixels(picture("P")))


@pytest.mark.parametrize("mode", ["RGB", "L", "LA", "P", "RGBA", "1", "I;16", "CMYK", "GIF"])
@pytest.mark.parametrize("turned", [None, 6])
def test_files_and_rows_are_read_as_transformers_reads_files(tmp_path, mode, turned):
    pixels = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
    images = [PIL.Image.fromarray(pixels), PIL.Image.fromarray(255 - pixels)]
    file = tmp_path / f"a picture.{({'CMYK': 'jpg', 'GIF': 'gif'}).get(mode, 'png')}"
    options = {"save_all": True, "append_images": images[1:]} if mode == "GIF" else {}
    if turned and mode != "GIF":
        options["exif"] = PIL.Image.Exif()
        options["exif"][PIL.ExifTags.Base.Orientation] = turned
    grey = PIL.Image.fromarray(pixels[:, :, 0].astype(np.uint16) * 257)
    image = grey if mode == "I;16" else images[0].convert("RGB" if mode == "GIF" else mode)
    image.save(file, **options)
    with PIL.Image.open(file) as opened:
        expected = np.asarray(transformers.image_utils.load_image(opened))
    assert (expected.shape[0] == 6) is (turned == 6 and mode != "GIF")
    np.testing.assert_array_equal(image_of_file(file), expected)
    rows = as_images(rows_of({"image": [file.read_bytes()]}), "image")
    np.testing.assert_array_equal(image_of_row(rows, "image", 0), expected)


def test_image_batches_keep_order_and_labels_and_have_one_size():
    images = [encoded(PIL.Image.new("RGB", (4, 4), (0, index, 0))) for index in (0, 1, 2, 0, 1, 2)]
    rows = rows_of({"image": images, "label": [0, 0, 0, 1, 1, 1]})
    batches = image_batches(rows, batch_size=4, label="label")
    assert [batch["pixel_values"].shape for batch in batches] == [(4, 3, 4, 4), (2, 3, 4, 4)]
    assert torch.cat([batch["labels"] for batch in batches]).tolist() == [0, 0, 0, 1, 1, 1]
    green = torch.cat([batch["pixel_values"] for batch in batches])[:, 1, 0, 0]
    assert (green * 127.5 + 127.5).round().tolist() == [0, 1, 2, 0, 1, 2]
    rows = rows_of({"image": [encoded(PIL.Image.new("RGB", size)) for size in ((3, 9), (20, 5))]})
    assert image_batches(rows, size=6)[0]["pixel_values"].shape == (2, 3, 6, 6)


def pixels_for(channels, means):
    """Return the pixels of a picture for a model of so many channels, by a processor that scales so many."""
    rows, config = rows_of({"image": [encoded(picture())]}), ViTConfig(num_channels=channels)
    scale = {"image_mean": [0.5] * means, "image_std": [0.5] * means}
    processor = ViTImageProcessorPil(size={"height": 4, "width": 4}, **scale)
    reader = reading("image-classification", columns=Columns(image="image"), config=config, processor=processor)
    return reader.read(rows, size=8)[0]["pixel_values"][0]


def test_images_are_grey_for_a_model_of_one_channel():
    expected = torch.tensor(np.asarray(picture().convert("L")))[None]
    torch.testing.assert_close(pixels_for(1, 1), expected / 127.5 - 1)


@pytest.mark.parametrize(("channels", "means"), [(1, 3), (4, 3), (4, 4)])
def test_images_of_other_channels_than_the_models_are_refused(channels, means):
    with pytest.raises(DataError, match=f"must take images of {channels} channels, .*3.*; give the one"):
        pixels_for(channels, means)


def test_an_image_that_pillow_takes_for_an_attack(monkeypatch):
    monkeypatch.setattr(PIL.Image, "MAX_IMAGE_PIXELS", 4)
    with pytest.raises(DataError, match="every 'image' must be an image, .*exceeds limit"):
        image_batches(rows_of({"image": [encoded(picture())]}))


def test_image_processors_use_pillow_without_a_word(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    ViTImageProcessorPil(size={"height": 6, "width": 6}).save_pretrained(tmp_path)
    loaded = load_processor(tmp_path, task=TASKS["image-classification"])
    assert (type(loaded), loaded.size["height"], caplog.text) == (ViTImageProcessorPil, 6, "")
    # Even where torchvision is.
    load = Mock(return_value=loaded)
    monkeypatch.setattr(transformers.AutoImageProcessor, "from_pretrained", load)
    load_processor("org/model", task=TASKS["image-classification"])
    load.assert_called_once_with("org/model", backend="pil", trust_remote_code=False)


def test_a_checkpoint_without_processor(tmp_path):
    for config, task, what in (
        (BertConfig(), "text-classification", "a tokenizer"),
        (ViTConfig(), "image-classification", "an image processor"),
    ):
        config.save_pretrained(tmp_path)
        with pytest.raises(DataError, match=rf"needs {what}, but .*save_pretrained"):
            load_processor(tmp_path, task=TASKS[task])


def test_a_tokenizer_with_a_number_that_no_model_has_is_refused(tmp_path):
    # Copying it would look up a billion numbers.
    save_text_model(tmp_path)
    file = tmp_path / "tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["vocab"][next(iter(content["model"]["vocab"]))] = 10**9
    file.write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"a tokenizer, but .* it numbers a token 1,000,000,000"):
        load_processor(tmp_path, task=TASKS["text-classification"])


def test_the_fingerprint_of_batches_depends_on_all_that_is_in_them_alone():
    base = {"a": torch.arange(6).reshape(2, 3), "b": torch.ones(2)}
    variants = [
        [base],
        [base, base],
        [{**base, "b": torch.tensor([1.0, 2.0])}],
        [{**base, "b": torch.ones(2).view(torch.int32)}],
        [{**base, "a": torch.arange(6).reshape(3, 2)}],
        [{"a": base["a"], "c": base["b"]}],
        [{"a": base["a"]}, {"b": base["b"]}],
    ]
    prints = [batches_fingerprint(variant) for variant in variants]
    assert len(set(prints)) == len(prints)
    assert all(re.fullmatch("[0-9a-f]{64}", value) for value in prints)
    same = {"b": torch.tensor(1.0, dtype=torch.bfloat16), "a": base["a"].T.contiguous().T}
    assert not same["a"].is_contiguous()
    again = {"a": base["a"], "b": torch.tensor(1.0, dtype=torch.bfloat16)}
    assert batches_fingerprint([same]) == batches_fingerprint([again])
