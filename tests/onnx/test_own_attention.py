"""Encoders whose attention is code of their own, cut unevenly: ONNX Runtime gives what torch gives, task by task."""

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from support.cuts import random_neurons
from support.exported import run_onnx
from support.models import SIX_HEADS, shake, text_batch
from torch import Tensor
from transformers import PreTrainedModel

from hies_export import PruningPlan, export_onnx, find_modules, prune_units, quantize_onnx
from hies_export.kinds import BOTH

SMALL = SIX_HEADS | {"num_hidden_layers": 1, "vocab_size": 100, "max_position_embeddings": 64}
# As in the checkpoints of DeBERTa-v3.
RELATIVE = {
    "relative_attention": True,
    "position_buckets": 8,
    "max_relative_positions": -1,
    "pos_att_type": ["p2c", "c2p"],
    "share_att_key": True,
    "position_biased_input": False,
    "norm_rel_ebd": "layer_norm",
    "type_vocab_size": 0,
}
CONFIGS = {"DebertaV2": transformers.DebertaV2Config(**SMALL, **RELATIVE), "MPNet": transformers.MPNetConfig(**SMALL)}
DEFAULT = ("DebertaV2", "ForSequenceClassification")  # `-m exports` takes all


def cut(model: PreTrainedModel) -> PreTrainedModel:
    """Remove other numbers of heads and neurons in every layer."""
    modules = find_modules(model, text_batch(labels=False), kinds=BOTH)
    return prune_units(model, PruningPlan(kept=random_neurons(modules, uniform=False), criterion="random"), modules)


def padded(rows: int, length: int) -> dict[str, Tensor]:
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1:, length // 2 :] = 0
    return {"input_ids": torch.randint(3, 100, (rows, length)), "attention_mask": mask}


@pytest.mark.parametrize(
    ("name", "head"),
    [
        pytest.param(name, head, marks=() if (name, head) == DEFAULT else pytest.mark.exports)
        for name in CONFIGS
        for head in ("ForSequenceClassification", "ForTokenClassification", "Model")
    ],
)
def test_a_cut_encoder_is_exported_for_its_task(name: str, head: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    slim = cut(shake(getattr(transformers, name + head)(CONFIGS[name])))
    exported = export_onnx(slim, tmp_path / "onnx", batch=text_batch(labels=False))
    quantised = quantize_onnx(exported, tmp_path / "int8", batch=text_batch(labels=False), smallest=1)
    first = "last_hidden_state" if head == "Model" else "logits"
    for batch in (padded(3, 12), padded(2, 30)):  # longer than position_buckets, and than the batch of the export
        with torch.no_grad():
            expected = slim(**batch)[0].numpy()
        assert np.abs(run_onnx(exported.file, batch)[first] - expected).max() < 1e-4
        real = batch["attention_mask"].bool().numpy() if expected.ndim == 3 else slice(None)
        rounded = run_onnx(quantised.file, batch)[first]
        assert np.corrcoef(rounded[real].ravel(), expected[real].ravel())[0, 1] > 0.95
        assert np.abs(rounded - expected).max() > 1e-4  # it is in 8 bits
