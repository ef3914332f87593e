"""Show that two versions of the package compute the same, float by float.

python bench/same_numbers.py record OUT.json [--package CHECKOUT] [--only NAME] [--folder DIR]
python bench/same_numbers.py compare BEFORE.json AFTER.json [--only NAME]

`record` makes tiny random models and data from fixed seeds, runs a list of recipes on them with the `hies_export` of a
checkout, and writes down what came out: kept heads, scores, statistics, digests of the slim weights, the report's
numbers. `compare` prints a Markdown table of two such files. Its exit code is 0 if everything is equal, else 1.

The package is driven by its command line alone, and nothing of it is imported. What this file relies on are the fields
of a recipe and the files that a run writes, so that it works on both sides of a change of the modules. All processes
have one thread. Two files can be compared if they come from one machine and one environment, because other processors
and other libraries round differently.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast

ROOT = Path(__file__).resolve().parents[1]

# For this process, which makes the models, and for those that run the recipes.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "CUDA_VISIBLE_DEVICES": "",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONDONTWRITEBYTECODE": "1",
}

HEAD_WIDTH = 8
BERT_WORDS = ["good", "bad", "fine", "poor", "great", "awful", "nice", "dull", "bright", "dark"]
STORY_WORDS = [*"abcdefghijklmnop", "yes", "no", "Q", "A"]

# What is recorded of scores.json and of report.json.
STATISTICS = ("his", "entropy", "weight_l2", "alpha_curve")
QUALITY = ("quality", "stability")
REST = ("heads", "parameters", "flops", "cut_max_abs", "alpha")


# ---- recipes -------------------------------------------------------------------------------------------------------


def recipe(model: str, *, prune: Mapping[str, Any], **sections: Any) -> dict[str, Any]:
    """Return a recipe for one of the models that `build` makes."""
    family = model.partition("-")[0]
    files = {split: f"{model}/{split}.{'parquet' if family in ('vit', 'llava') else 'jsonl'}" for split in SPLITS}
    common: dict[str, Any] = {
        "model": f"{model}/model",
        "dtype": "float32",
        "calibration": {"samples": 24, "batch_size": 8, "seed": 1},
        "measure": {"runtimes": [], "shapes": [[2, 16]]},
    }
    of_family: dict[str, dict[str, Any]] = {
        "bert": {
            "task": "text-classification",
            "data": {"files": files, "text": "text", "label": "label"},
        },
        "vit": {
            "task": "image-classification",
            "data": {"files": files, "image": "image", "label": "label"},
            "measure": {"runtimes": [], "shapes": [[2]]},
        },
        "tagger": {
            "task": "token-classification",
            "data": {"files": files, "text": "tokens", "label": "tags"},
        },
        "embedder": {
            "task": "feature-extraction",
            "data": {"files": files, "query": "query", "document": "document"},
        },
        "llama": {
            "task": "text-generation",
            "data": {"files": files, "text": "text", "max_length": 24},
        },
        "llava": {
            "task": "image-text-to-text",
            "data": {"files": files, "image": "image", "prompt": "{question}\nA", "answer": "answer"},
            "evaluation": {"metrics": ["perplexity", "exact_match"]},
            "measure": {"runtimes": [], "shapes": [[1]]},
        },
    }
    return {**common, **of_family[family], "prune": dict(prune), **sections}


SPLITS = {"train": 192, "validation": 64}
LEAST_SQUARES = {"method": "least_squares", "samples": 64}
BOTH_KINDS = {"modules": ["attention", "mlp"], "criterion": "compensated", "compensation": LEAST_SQUARES}

RECIPES: dict[str, dict[str, Any]] = {
    "bert-hies": recipe("bert", prune={"alpha": "auto", "budget": {"heads": 0.4}, "compensation": LEAST_SQUARES}),
    "bert-hies-compensated": recipe(
        "bert", prune={"criterion": "hies-compensated", "budget": {"heads": 0.4}, "compensation": LEAST_SQUARES}
    ),
    "vit-hies": recipe(
        "vit", prune={"alpha": 0.5, "budget": {"heads": 0.4}, "compensation": {"method": "bias", "samples": 64}}
    ),
    "vit-hies-compensated": recipe(
        "vit", prune={"criterion": "hies-compensated", "budget": {"heads": 0.4}, "compensation": LEAST_SQUARES}
    ),
    "llama-gqa-global": recipe("llama", prune={"alpha": 0.5, "budget": {"heads": 0.4}, "compensation": LEAST_SQUARES}),
    # Four of eight query heads divide the width of 64, so that the slim checkpoint is a plain one.
    "llama-gqa-uniform": recipe(
        "llama",
        prune={"alpha": 0.5, "budget": {"heads": 0.5}, "allocation": "uniform", "compensation": LEAST_SQUARES},
    ),
    "llama-unit-query": recipe("llama", prune={"alpha": 0.5, "budget": {"heads": 0.34}, "unit": "query"}),
    "llama-wide-unit-query": recipe(
        "llama-wide",
        prune={"alpha": 0.5, "budget": {"heads": 0.4}, "unit": "query", "compensation": LEAST_SQUARES},
    ),
    "llava-both-towers": recipe(
        "llava",
        prune={
            "alpha": 0.5,
            "towers": ["language", "vision"],
            "budget": {"heads": 0.4},
            "compensation": LEAST_SQUARES,
        },
    ),
    "bert-flops-budget": recipe("bert", prune={"alpha": 0.5, "budget": {"flops": 0.85}, "compensation": LEAST_SQUARES}),
    "bert-max-drop": recipe(
        "bert",
        prune={
            "alpha": "auto",
            "budget": {"max_drop": {"metric": "accuracy", "by": 0.05}},
            # Few rows to refit on, so that nearly none of them is held out as well.
            "compensation": {**LEAST_SQUARES, "samples": 32},
        },
    ),
    "bert-steps-3": recipe(
        "bert", prune={"alpha": 0.5, "budget": {"heads": 0.4}, "steps": 3, "compensation": LEAST_SQUARES}
    ),
    "bert-uncompensated": recipe("bert", prune={"criterion": "his", "budget": {"heads": 0.4}}),
    "bert-sequential": recipe(
        "bert", prune={"alpha": 0.5, "budget": {"heads": 0.4}, "compensation": {**LEAST_SQUARES, "sequential": True}}
    ),
    "bert-obs": recipe("bert", prune={"criterion": "obs", "budget": {"heads": 0.4}, "compensation": LEAST_SQUARES}),
    # Eight layers, so that the criterion spares the first three and the last.
    "llama-llm-pruner-block": recipe("llama-deep", prune={"criterion": "llm-pruner-block", "budget": {"heads": 0.25}}),
    "bert-constraints": recipe(
        "bert",
        prune={
            "alpha": 0.5,
            "normalize": "layer",
            "budget": {"heads": 0.4},
            "keep_layers": [0],
            "min_heads": 2,
            "multiple_of": 2,
        },
    ),
    "bert-both-kinds-auto": recipe(
        "bert",
        prune={**BOTH_KINDS, "criterion": "auto", "budget": {"flops": 0.7}},
    ),
    "bert-keep-torch": recipe("bert", prune={**BOTH_KINDS, "budget": {"keep": 0.8}}),
    # Heads alone, as only neurons beside them are weighed by times, which differ from run to run.
    "bert-keep-onnxruntime": recipe(
        "bert",
        prune={
            **BOTH_KINDS,
            "modules": ["attention"],
            "budget": {"keep": {"predictions": 0.8, "runtime": "onnxruntime-cpu"}},
        },
        export={},
    ),
    "bert-cascade": recipe(
        "bert",
        prune={**BOTH_KINDS, "budget": {"flops": 0.6}},
        export={},
        cascade={"disagreement": 0.2},
    ),
    "tagger-entities": recipe("tagger", prune={**BOTH_KINDS, "budget": {"flops": 0.7}}),
    "embedder-keep-ndcg": recipe(
        "embedder", prune={**BOTH_KINDS, "budget": {"keep": {"metric": "ndcg@10", "predictions": 0.8}}}
    ),
    # A number instead of a class, so that the quality is a fine measure.
    "bert-number": recipe(
        "bert-number", prune={"alpha": "auto", "budget": {"heads": 0.4}, "compensation": LEAST_SQUARES}
    ),
}


# ---- models and data -----------------------------------------------------------------------------------------------


def build(model: str, folder: Path) -> None:
    """Make one of the tiny models and its rows.

    Args:
        model: Name of the model, as the recipes call it. Its first part is its family.
        folder: Folder to make. It gets model/ and a file of rows for every split.
    """
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    folder.mkdir()
    builders = {
        "bert": build_bert,
        "vit": build_vit,
        "tagger": build_tagger,
        "embedder": build_embedder,
        "llama": build_llama,
        "llava": build_llava,
    }
    builders[model.partition("-")[0]](folder, model)


def build_bert(folder: Path, name: str) -> None:
    """Make a BERT, and sentences with a class or a number each.

    "bert" has 3 layers of 6 narrow heads, and tells 2 classes apart. "bert-number" has 2 layers of 8 heads of the usual
    width, and predicts a number. Matrices as wide as these are multiplied in blocks, so that the output of a cut model
    differs from that of the masked one by rounding. That of narrower models does not differ at all.
    """
    from transformers import BertConfig, BertForSequenceClassification

    tokenizer = word_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]"], BERT_WORDS, template="[CLS] $A [SEP]")
    heads, head_width, layers, labels = (8, 64, 2, 1) if name == "bert-number" else (6, HEAD_WIDTH, 3, 2)
    config = BertConfig(
        vocab_size=len(tokenizer),
        hidden_size=heads * head_width,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=64,
        max_position_embeddings=64,
        num_labels=labels,
    )
    model = with_unlike_heads(BertForSequenceClassification(config), head_width=head_width)
    generator = random.Random(0)
    texts = [" ".join(generator.choices(BERT_WORDS, k=generator.randint(4, 20))) for _ in range(sum(SPLITS.values()))]
    inputs = tokenizer(texts, padding=True, return_tensors="pt")
    values = noisy_numbers(model, inputs) if name == "bert-number" else noisy_classes(model, inputs)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    write_jsonl(folder, [{"text": text, "label": value} for text, value in zip(texts, values, strict=True)])


def build_tagger(folder: Path, name: str) -> None:
    """Make a BERT that tells begins and insides of 2 kinds of entities from other words, and sentences in words."""
    import torch
    from transformers import BertConfig, BertForTokenClassification

    tokenizer = word_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]"], BERT_WORDS, template="[CLS] $A [SEP]")
    tags = ["O", "B-one", "I-one", "B-two", "I-two"]
    config = BertConfig(**encoder_fields(tokenizer), id2label=dict(enumerate(tags)))
    model = with_unlike_heads(BertForTokenClassification(config))
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = random.Random(0)
    rows = []
    for _ in range(sum(SPLITS.values())):
        words = generator.choices(BERT_WORDS, k=generator.randint(4, 12))
        with torch.no_grad():
            predicted = model(**tokenizer(" ".join(words), return_tensors="pt")).logits[0, 1:-1].argmax(-1).tolist()
        noisy = [generator.randrange(len(tags)) if generator.random() < 0.2 else tag for tag in predicted]
        rows.append({"tokens": words, "tags": [tags[tag] for tag in noisy]})
    write_jsonl(folder, rows)


def build_embedder(folder: Path, name: str) -> None:
    """Make a SentenceTransformer of a BERT with mean pooling, and queries that are words of their documents."""
    from transformers import BertConfig, BertModel

    tokenizer = word_tokenizer(["[PAD]", "[UNK]", "[CLS]", "[SEP]"], STORY_WORDS, template="[CLS] $A [SEP]")
    config = BertConfig(**encoder_fields(tokenizer))
    model = folder / "model"
    with_unlike_heads(BertModel(config)).save_pretrained(model)
    tokenizer.save_pretrained(model)
    prefix = "sentence_transformers.models"
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": f"{prefix}.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{prefix}.Pooling"},
    ]
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (model / "1_Pooling").mkdir()
    for file, content in (
        ("modules.json", modules),
        ("1_Pooling/config.json", pooling),
        ("sentence_bert_config.json", {"max_seq_length": 64}),
    ):
        (model / file).write_text(json.dumps(content))
    generator = random.Random(0)
    rows = []
    for _ in range(sum(SPLITS.values())):
        words = generator.choices(STORY_WORDS, k=generator.randint(8, 20))
        rows.append({"query": " ".join(generator.sample(words, 4)), "document": " ".join(words)})
    write_jsonl(folder, rows)


def encoder_fields(tokenizer: PreTrainedTokenizerFast) -> dict[str, int]:
    """Return the sizes of a BERT of 3 layers of 6 narrow heads."""
    return {
        "vocab_size": len(tokenizer),
        "hidden_size": 6 * HEAD_WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
    }


def build_vit(folder: Path, name: str) -> None:
    """Make a ViT of 3 layers of 6 heads, and images of noise in 3 classes."""
    from transformers import ViTConfig, ViTForImageClassification
    from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

    config = ViTConfig(
        hidden_size=6 * HEAD_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=64,
        image_size=16,
        patch_size=4,
        num_labels=3,
    )
    model = with_unlike_heads(ViTForImageClassification(config))
    processor = ViTImageProcessorPil(
        do_resize=False, size={"height": 16, "width": 16}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    images = noise_images(sum(SPLITS.values()))
    labels = noisy_classes(model, processor(images, return_tensors="pt"))
    model.save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    write_parquet(folder, {"image": images, "label": labels})


def build_llama(folder: Path, name: str) -> None:
    """Make a LLaMA of 3 layers of 8 query heads in 4 groups, and lines of text.

    The groups of "llama-wide" are 2, and the layers of "llama-deep" 8.
    """
    from transformers import LlamaForCausalLM

    tokenizer = story_tokenizer()
    options: dict[str, dict[str, int]] = {
        "llama": {},
        "llama-wide": {"num_key_value_heads": 2},
        "llama-deep": {"num_hidden_layers": 8},
    }
    with_unlike_heads(LlamaForCausalLM(decoder_config(tokenizer, **options[name]))).save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    generator = random.Random(0)
    lines = [" ".join(generator.choices(STORY_WORDS, k=24)) for _ in range(sum(SPLITS.values()))]
    write_jsonl(folder, [{"text": line} for line in lines])


def build_llava(folder: Path, name: str) -> None:
    """Make a LLaVA of a LLaMA and a CLIP of 3 layers of 4 heads, and questions about images of noise."""
    from transformers import (
        CLIPImageProcessorPil,
        CLIPVisionConfig,
        LlavaConfig,
        LlavaForConditionalGeneration,
        LlavaProcessor,
    )

    tokenizer = story_tokenizer()
    vision = CLIPVisionConfig(
        hidden_size=4 * HEAD_WIDTH,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=16,
        patch_size=4,
    )
    config = LlavaConfig(
        text_config=decoder_config(tokenizer),
        vision_config=vision,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
    )
    processor = LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}),
        tokenizer,
        patch_size=4,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )
    with_unlike_heads(LlavaForConditionalGeneration(config)).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    count, generator = sum(SPLITS.values()), random.Random(0)
    columns = {
        "image": noise_images(count),
        "question": [f"Q {' '.join(generator.choices(STORY_WORDS, k=generator.randint(1, 5)))}" for _ in range(count)],
        "answer": [generator.choice(["yes", "no"]) for _ in range(count)],
    }
    write_parquet(folder, columns)


def decoder_config(tokenizer: PreTrainedTokenizerFast, **options: int) -> Any:
    """Return the config of a LLaMA of 3 layers of 8 query heads in 4 groups, but for some options."""
    from transformers import LlamaConfig

    fields: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": 8 * HEAD_WIDTH,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 64,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    return LlamaConfig(**(fields | options))


def with_unlike_heads(model: PreTrainedModel, *, head_width: int = HEAD_WIDTH) -> PreTrainedModel:
    """Enlarge the weights, and give every head a sharpness of attention and a size of output of its own.

    The heads of a freshly initialised model are nearly alike. Rounding alone could then decide which of them go.
    """
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower():
                continue
            parameter.add_(torch.randn_like(parameter) * 0.12)
            if name.endswith(("query.weight", "q_proj.weight")):
                rows = parameter.view(-1, head_width, parameter.shape[1])
                rows.mul_(0.5 + 2.5 * torch.rand(len(rows), 1, 1))
            elif name.endswith(("attention.output.dense.weight", "o_proj.weight", "out_proj.weight")):
                columns = parameter.view(len(parameter), -1, head_width)
                columns.mul_(0.3 + 1.7 * torch.rand(1, columns.shape[1], 1))
    return model.eval()


def word_tokenizer(special: Sequence[str], words: Sequence[str], *, template: str) -> PreTrainedTokenizerFast:
    """Return a tokenizer with a token for every word.

    Args:
        special: The tokens for padding, unknown words, the beginning and the end, in this order. Others may follow.
        words: The words.
        template: What a text is put into, in the notation of tokenizers.
    """
    import tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {token: number for number, token in enumerate([*special, *words])}
    padding, unknown, begin, end, *others = special
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(numbers, unk_token=unknown))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [tokenizers.pre_tokenizers.Split("\n", "isolated"), tokenizers.pre_tokenizers.Split(" ", "removed")]
    )
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=[(begin, numbers[begin]), (end, numbers[end])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=padding,
        unk_token=unknown,
        bos_token=begin,
        eos_token=end,
        additional_special_tokens=[token for token in others if token.startswith("<")],
        model_max_length=64,
    )


def story_tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of the models that generate text.

    It puts <s> in front of a text.
    """
    return word_tokenizer(["<pad>", "<unk>", "<s>", "</s>", "<image>", "\n"], STORY_WORDS, template="<s> $A")


def noisy_classes(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[int]:
    """Return the classes that a model predicts for some rows, with another class for every fifth row.

    The bias of the classifier is changed first, so that no class is predicted for nearly all rows.
    """
    import torch

    with torch.no_grad():
        model.classifier.bias.sub_(model(**inputs).logits.mean(0))
        logits = model(**inputs).logits
    return [(label + (row % 5 == 0)) % logits.shape[1] for row, label in enumerate(logits.argmax(-1).tolist())]


def noisy_numbers(model: PreTrainedModel, inputs: Mapping[str, Any]) -> list[float]:
    """Return the numbers that a model predicts for some rows, brought to one scale, with noise."""
    import torch

    with torch.no_grad():
        logits = model(**inputs).logits.flatten()
    generator = random.Random(1)
    return [value + generator.gauss(0, 0.5) for value in ((logits - logits.mean()) / logits.std()).tolist()]


def noise_images(count: int) -> list[Any]:
    """Return images of 16 x 16 random pixels."""
    from PIL import Image

    generator = random.Random(2)
    return [Image.frombytes("RGB", (16, 16), generator.randbytes(16 * 16 * 3)) for _ in range(count)]


def write_jsonl(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows, split by split."""
    for split, start, stop in split_bounds():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[start:stop]))


def write_parquet(folder: Path, columns: Mapping[str, Sequence[Any]]) -> None:
    """Write rows with images, split by split."""
    from datasets import Dataset, Image, disable_progress_bars

    disable_progress_bars()
    for split, start, stop in split_bounds():
        rows = Dataset.from_dict({name: list(values[start:stop]) for name, values in columns.items()})
        rows.cast_column("image", Image()).to_parquet(folder / f"{split}.parquet")


def split_bounds() -> Iterator[tuple[str, int, int]]:
    """Yield every split with the number of its first row and the number after its last."""
    start = 0
    for split, count in SPLITS.items():
        yield split, start, start + count
        start += count


# ---- record --------------------------------------------------------------------------------------------------------


def record(out: Path, *, package: Path, only: Sequence[str], folder: Path) -> int:
    """Run the recipes and write what came out.

    Args:
        out: File to write.
        package: Checkout with the `hies_export` to run.
        only: Names of the recipes to run. By default all of them run.
        folder: Empty folder for models, data and runs.

    Returns:
        0 if every recipe ran, else 1.
    """
    import yaml

    package = package.resolve()
    environment = {
        **os.environ,
        "PYTHONPATH": str(package),
        # What earlier runs left in a cache must not be read.
        "HF_HOME": str(folder / "hf"),
    }
    check_package(package, environment)
    found: dict[str, Any] = {}
    failed = False
    started = time.perf_counter()
    for name in only or RECIPES:
        fields = RECIPES[name]
        model = Path(fields["model"]).parent.name
        if not (folder / model).exists():
            build(model, folder / model)
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(json.loads(json.dumps(fields)) | {"output": f"runs/{name}"}))
        command = [sys.executable, "-m", "hies_export", "run", str(path)]
        before = time.perf_counter()
        process = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
        if process.returncode:
            failed = True
            found[name] = {"error": process.stderr[-2000:]}
            print(f"{name} failed:\n{process.stderr[-2000:]}", file=sys.stderr)
        else:
            found[name] = {"inputs": digest_inputs(folder / model), **what_came_out(folder / "runs" / name)}
            print(f"{name}: {time.perf_counter() - before:.1f} s", file=sys.stderr, flush=True)
        # After every recipe, so that an interruption loses nothing that is done.
        out.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(found)} recipes in {time.perf_counter() - started:.0f} s, written to {out}", file=sys.stderr)
    return int(failed)


def check_package(package: Path, environment: Mapping[str, str]) -> None:
    """Exit unless the processes import `hies_export` from the checkout."""
    if not (package / "hies_export").is_dir():
        sys.exit(f"--package must be a checkout with the folder hies_export, got {package}")
    command = [sys.executable, "-c", "import hies_export; print(hies_export.__file__)"]
    process = subprocess.run(command, cwd=package, env=environment, capture_output=True, text=True)
    where = process.stdout.strip()
    if process.returncode or package not in Path(where).resolve().parents:
        sys.exit(f"hies_export must be imported from {package}, got {where or process.stderr}")


def what_came_out(run: Path) -> dict[str, Any]:
    """Return what is compared of a finished run."""
    scores, report = read_json(run / "scores.json"), read_json(run / "report.json")
    return {
        "kept": kept_heads(read_json(run / "plan.json")),
        "scores": scores["scores"],
        "statistics": {key: scores[key] for key in STATISTICS if key in scores},
        "weights": digest_tensors(run / "slim"),
        "quality": {key: report[key] for key in QUALITY},
        "rest": {key: report[key] for key in REST},
    }


def read_json(path: Path) -> Any:
    """Return the content of a JSON file."""
    return json.loads(path.read_text(encoding="utf-8"))


def kept_heads(plan: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the heads that a plan keeps, in the same form for both formats of a plan."""
    found = {}
    for module, kept in plan["kept"].items():
        if plan["format"] == 1:
            query, key_value = kept["query"], kept["key_value"]
            heads, groups = kept["heads"], kept["key_value_heads"]
        else:
            query, heads, groups = kept["units"], kept["total"], kept["groups"]
            key_value = sorted({unit // (heads // groups) for unit in query}) if groups else []
        found[module] = {
            "query": list(query),
            "key_value": list(key_value),
            "heads": heads,
            "key_value_heads": groups,
        }
    return found


def digest_tensors(folder: Path) -> str:
    """Return the SHA-256 of name, dtype, shape and bytes of every tensor of a checkpoint, in the order of the names.

    It does not depend on the metadata of the files, on their number, or on the order of the tensors in them.
    """
    tensors: dict[str, tuple[str, bytes]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        content = file.read_bytes()
        # A safetensors file is the length of its header, the header, and the bytes of the tensors.
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = entry["data_offsets"]
            tensors[name] = (f"{name} {entry['dtype']} {entry['shape']}", content[start + first : start + last])
    if not tensors:
        raise FileNotFoundError(f"a checkpoint must have safetensors, but there are none in {folder}")
    digest = hashlib.sha256()
    for _, (said, values) in sorted(tensors.items()):
        digest.update(f"{said} {len(values)}\n".encode())
        digest.update(values)
    return digest.hexdigest()


def digest_inputs(folder: Path) -> str:
    """Return the SHA-256 of the weights and the rows that `build` made."""
    digest = hashlib.sha256(digest_tensors(folder / "model").encode())
    for split in SPLITS:
        digest.update(next(folder.glob(f"{split}.*")).read_bytes())
    return digest.hexdigest()


# ---- compare -------------------------------------------------------------------------------------------------------


def compare(before: Mapping[str, Any], after: Mapping[str, Any], *, only: Sequence[str]) -> int:
    """Print a Markdown table of what two records say.

    Args:
        before: What `record` wrote.
        after: The same of the other version.
        only: Names of the recipes to compare. By default those of both records are.

    Returns:
        0 if everything is equal, else 1.
    """
    names = list(only or dict.fromkeys([*before, *after]))
    columns: dict[str, Callable[[Any, Any], str]] = {
        "same kept heads": lambda a, b: say(a["kept"], b["kept"]),
        "same scores": lambda a, b: say(a["scores"], b["scores"]),
        "same statistics": lambda a, b: say(a["statistics"], b["statistics"]),
        "same slim weights": lambda a, b: say(a["weights"], b["weights"]),
        "same quality": lambda a, b: say(a["quality"], b["quality"]),
        "same counts, cut error, alpha": lambda a, b: say(a["rest"], b["rest"]),
    }
    print("| " + " | ".join(["recipe", "heads removed", *columns]) + " |")
    print("| --- " * (len(columns) + 2) + "|")
    different = []
    for name in names:
        a, b = before.get(name), after.get(name)
        if a is None or b is None or "error" in a or "error" in b:
            said = [f"{state(a)} before, {state(b)} after", *[""] * len(columns)]
        elif a["inputs"] != b["inputs"]:
            said = ["made from other models or rows", *[""] * len(columns)]
        else:
            removed = dict.fromkeys([heads_removed(a), heads_removed(b)])
            said = [", then ".join(removed), *(column(a, b) for column in columns.values())]
        if any(text != "yes" for text in said[1:]):
            different.append(name)
        print("| " + " | ".join([name, *said]) + " |")
    equal = not different and bool(names)
    print(f"\n{len(names)} recipes: " + ("all equal" if equal else f"different in {', '.join(different) or 'nothing'}"))
    return int(not equal)


def state(recorded: Mapping[str, Any] | None) -> str:
    """Say in a word what became of a recipe."""
    return "missing" if recorded is None else "failed" if "error" in recorded else "recorded"


def heads_removed(recorded: Mapping[str, Any]) -> str:
    """Say how many query heads the plan of a recipe removes."""
    total = sum(kept["heads"] for kept in recorded["kept"].values())
    return f"{total - sum(len(kept['query']) for kept in recorded['kept'].values())} of {total}"


def say(a: Any, b: Any) -> str:
    """Say "yes" where two values are equal, else how many differences there are, the largest, and where it is."""
    found = list(differences(a, b, ""))
    if not found:
        return "yes"
    largest, where = max(found, key=lambda item: item[0])
    by = "" if math.isinf(largest) else f", by up to {largest:.3g}"
    return f"**no**: differences: {len(found)}{by}" + (f", at {where}" if where else "")


def differences(a: Any, b: Any, where: str) -> Iterator[tuple[float, str]]:
    """Yield every place where two values out of JSON differ.

    Yields:
        The absolute difference and the place. The difference is infinite where not both are finite numbers.
    """
    if isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys([*a, *b]):
            place = f"{where}.{key}" if where else str(key)
            if key in a and key in b:
                yield from differences(a[key], b[key], place)
            else:
                yield math.inf, place
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for index, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from differences(one, other, f"{where}[{index}]")
    elif a != b and not (a != a and b != b):  # NaN is the same as NaN here
        numbers = all(isinstance(value, (int, float)) and math.isfinite(value) for value in (a, b))
        yield abs(a - b) if numbers else math.inf, where


def main() -> int:
    """Run what the command line says.

    Returns:
        The exit code.
    """
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = commands.add_parser("record", help="run the recipes and write what came out")
    recording.add_argument("out", metavar="OUT.json", type=Path)
    recording.add_argument("--package", metavar="CHECKOUT", type=Path, default=ROOT, help="default: this checkout")
    recording.add_argument("--folder", metavar="DIR", type=Path, help="keep models, data and runs in this new folder")
    comparing = commands.add_parser("compare", help="print a table of two such files")
    comparing.add_argument("before", metavar="BEFORE.json", type=Path)
    comparing.add_argument("after", metavar="AFTER.json", type=Path)
    for command in (recording, comparing):
        command.add_argument("--only", metavar="NAME", action="append", default=[], choices=list(RECIPES))
    options = parser.parse_args()
    if options.command == "compare":
        return compare(read_json(options.before), read_json(options.after), only=options.only)
    # Before torch is imported, which reads the number of threads once.
    os.environ.update(ENVIRONMENT)
    if options.folder:
        options.folder.mkdir(parents=True)
        return record(options.out, package=options.package, only=options.only, folder=options.folder.resolve())
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as temporary:
        return record(options.out, package=options.package, only=options.only, folder=Path(temporary).resolve())


if __name__ == "__main__":
    sys.exit(main())
