import getpass
import platform

import pytest
import torch
from support.models import bert, causal_lm, cut_bert, vit
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    BertForMaskedLM,
    BertForSequenceClassification,
    DebertaV2Config,
    DebertaV2ForTokenClassification,
)

from hies_export.errors import RecipeError
from hies_export.forms import machine
from hies_export.forms.machine import machine_facts
from hies_export.model.copies import parameter_bytes
from hies_export.model.tokens import sequence_length, synthetic_batch
from hies_export.slim.cut import prune_units
from hies_export.units import counts
from hies_export.units.counts import count_flops, count_parameters
from hies_export.units.find import find_modules


def bert_flops(heads, *, rows, tokens, hidden=48, head_dim=8, inner=64, labels=3):
    """Multiply-adds twice: q, k, v and o; scores and context; both MLP halves; pooler and classifier."""
    total = 0
    for count in heads:
        width = count * head_dim
        total += 2 * rows * tokens * 4 * hidden * width
        total += 2 * rows * 2 * tokens * tokens * width
        total += 2 * rows * tokens * 2 * hidden * inner
    return total + 2 * rows * hidden * hidden + 2 * rows * hidden * labels


@pytest.fixture
def copies(monkeypatch):
    """The devices that copies of the model were made for."""
    devices, original = [], counts.share_weights

    def recorded(model, *, device=None):
        devices.append(device)
        return original(model, device=device)

    monkeypatch.setattr(counts, "share_weights", recorded)
    return devices


def test_the_backbone_is_all_but_embeddings_norm_and_head():
    """Whether the head has weights of its own or not."""
    for tied in (False, True):
        dense = causal_lm(tie_word_embeddings=tied)
        batch = synthetic_batch(dense, batch=2, sequence=7)
        modules = find_modules(dense, batch, kinds=["attention", "mlp"])
        kept = {module.name: module.kept(range(module.group_size)) for module in modules}
        slim, vocabulary = prune_units(dense, kept, modules), dense.lm_head.weight.numel()
        found = counts.count_both_parameters(dense, slim)
        outside = vocabulary * (1 if tied else 2) + dense.model.norm.weight.numel()
        assert found.backbone == {"dense": found.dense - outside, "slim": found.slim - outside}
        flops = counts.count_both_flops(dense, slim, {(2, 7): batch})[2, 7]
        head = 2 * 2 * 7 * vocabulary
        assert flops.backbone == {"dense": flops.dense - head, "slim": flops.slim - head}
        assert flops.backbone.ratio < flops.ratio < 1
    assert counts.count_both_parameters(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)).backbone is None


def test_flops_of_dense_and_uneven_bert_equal_the_formula(copies):
    model, rows, tokens = bert().train(), 3, 7
    batch = synthetic_batch(model, batch=rows, sequence=tokens) | {"labels": torch.zeros(rows, dtype=torch.long)}
    assert count_flops(model, batch) == bert_flops((6, 6, 6), rows=rows, tokens=tokens)
    assert count_flops(cut_bert(model, (3, 1, 4)), batch) == bert_flops((3, 1, 4), rows=rows, tokens=tokens)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    assert copies == ["meta", "meta"]


def test_flops_of_vit_equal_the_formula(copies):
    model = vit()
    batch = synthetic_batch(model, batch=2)
    layers = bert_flops((6, 6, 6), rows=2, tokens=17) - 2 * 2 * 48 * (48 + 3)
    patches = 2 * 2 * 16 * (3 * 4 * 4) * 48
    assert count_flops(model, batch) == layers + patches + 2 * 2 * 48 * 3
    assert copies == ["meta"]


class Picky(BertForSequenceClassification):
    def forward(self, input_ids, **options):
        assert int(input_ids.max()) >= 0
        return super().forward(input_ids, **options)


class PickyWithoutMask(Picky):
    def forward(self, input_ids):
        return super().forward(input_ids)


@pytest.mark.parametrize("cls", [Picky, PickyWithoutMask])
def test_flops_of_a_forward_that_reads_values_are_counted_for_real(cls, copies):
    model, batch = cls(bert().config), {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    assert count_flops(model, batch) == bert_flops((6, 6, 6), rows=2, tokens=5)
    assert copies[0] == "meta"
    assert copies[-1] is None


@pytest.mark.parametrize("masked", [True, False])
def test_flops_of_a_decoder_are_counted_without_data_with_a_mask_and_without(copies, masked) -> None:
    """Without a mask, transformers reads the positions' values."""
    model = causal_lm(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)
    batch = {"input_ids": torch.ones(2, 5, dtype=torch.long)}
    if masked:
        batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    found = count_flops(model, batch)
    assert count_flops(model, batch) == found
    assert set(copies) == {"meta"}
    assert len(copies) <= 2, "remembered"
    with FlopCounterMode(display=False) as counter:
        eager = type(model)(model.config)
        eager.set_attn_implementation("eager")
        eager(**batch)
    assert found == counter.get_total_flops()


def test_flops_of_a_model_to_train_whose_code_takes_views_of_parameters() -> None:
    """The counter follows gradients, and a view of a trainable parameter asks for one even under `no_grad`."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    relative = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8}
    model = DebertaV2ForTokenClassification(DebertaV2Config(vocab_size=60, **sizes, **relative))
    batch = {"input_ids": torch.randint(5, 60, (2, 12))}
    trainable = count_flops(model, batch)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert trainable == count_flops(model.requires_grad_(False), batch) > 0


def test_parameters_count_tied_weights_once():
    model = BertForMaskedLM(bert().config)
    unique = {tensor.data_ptr(): tensor for tensor in model.state_dict().values() if tensor.is_floating_point()}
    assert count_parameters(model) == sum(tensor.numel() for tensor in unique.values())
    assert count_parameters(model) < sum(t.numel() for t in model.state_dict().values() if t.is_floating_point())
    assert parameter_bytes(model) == 4 * count_parameters(model)
    assert parameter_bytes(model.half()) == 2 * count_parameters(model)


def test_synthetic_batches_and_what_the_attention_sees():
    model = bert()
    batch = synthetic_batch(model, batch=3, sequence=16)
    assert batch["input_ids"].shape == batch["attention_mask"].shape == (3, 16)
    assert batch["attention_mask"].min() == 1
    assert sequence_length(model, batch) == 16
    for size, patch, tokens in ((16, 4, 17), ((16, 32), 8, 9)):
        model = vit(image_size=size, patch_size=patch, num_channels=1)
        images = synthetic_batch(model, batch=2, sequence=99)
        height, width = size if isinstance(size, tuple) else (size, size)
        assert images["pixel_values"].shape == (2, 1, height, width)
        assert sequence_length(model, images) == tokens


@pytest.mark.parametrize("sequence", [None, 0])
def test_impossible_shapes(sequence):
    with pytest.raises(RecipeError, match=rf"sequence must be in 1\.\.64 for Bert\w+, got {sequence}"):
        synthetic_batch(bert(), batch=1, sequence=sequence)


def test_environment_tells_versions_and_nobodys_name():
    facts = machine_facts()
    assert torch.__version__.startswith(facts["torch"])
    assert facts["python"] == platform.python_version()
    assert facts["cores"] >= 1
    assert facts["threads"] == torch.get_num_threads()
    assert set(facts) >= {"transformers", "onnxruntime", "optimum", "cpu", "gpu", "os"}
    shown = " ".join(str(value) for value in facts.values())
    assert platform.node() not in shown
    assert "/" not in shown
    assert getpass.getuser() not in shown.split()
    assert machine._version("no-such-package-at-all") is None
