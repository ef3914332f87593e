"""prune() on models and batches in the states that users of other tools reported: each is right, or refused at once."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.models import bert, causal_lm, image_batch, llama, shake, text_batch, vit, zero_padding
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils import prune as torch_prune
from transformers import AlbertConfig, AlbertForSequenceClassification, OPTConfig, OPTForCausalLM, PreTrainedModel

from hies_export import NonFiniteError, RequestError, load, prune

Model = Callable[[], PreTrainedModel]
Change = Callable[[Any], object]


def texts(rows: int = 4) -> list[dict[str, torch.Tensor]]:
    return [zero_padding(text_batch(rows)) for _ in range(3)]


def stories() -> list[dict[str, torch.Tensor]]:
    rows = [torch.randint(4, 32, (4, 8)) for _ in range(3)]
    return [{"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()} for ids in rows]


def drop_a_layer(model: Any, *, say_so: bool) -> None:
    model.bert.encoder.layer = model.bert.encoder.layer[:2]
    model.config.num_hidden_layers = 2 if say_so else 3


def other_head(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(1.5 * model.lm_head.weight.detach())


def albert() -> PreTrainedModel:
    sizes = {"vocab_size": 100, "embedding_size": 16, "hidden_size": 48, "num_hidden_layers": 3, "num_labels": 3}
    return shake(AlbertForSequenceClassification(AlbertConfig(**sizes, num_attention_heads=6, intermediate_size=64)))


def with_layerdrop() -> PreTrainedModel:
    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 32}
    config = OPTConfig(**sizes, word_embed_proj_dim=32, max_position_embeddings=64, layerdrop=0.9)
    return shake(OPTForCausalLM(config)).train()


def as_it_is(model: Any) -> None:
    """Change nothing."""


RIGHT: dict[str, tuple[Model, Change, Callable[[], Any]]] = {
    "frozen": (bert, lambda m: m.requires_grad_(False), texts),
    "in train mode, layers dropped at random": (with_layerdrop, as_it_is, stories),
    "layers removed, and the config says so": (bert, partial(drop_a_layer, say_so=True), texts),
    "embeddings resized": (bert, lambda m: m.resize_token_embeddings(104), texts),
    "a trained head in place of the tied one": (partial(causal_lm, tie_word_embeddings=True), other_head, stories),
    "layers that share their weights": (albert, as_it_is, texts),
    "images in float64": (vit, as_it_is, lambda: [{"pixel_values": torch.rand(4, 3, 16, 16).double()}] * 3),
    "cast, with the frequencies of its rotary embeddings": (
        *(causal_lm, lambda m: m.to(torch.bfloat16)),
        lambda: [{key: value.repeat(1, 6) for key, value in batch.items()} for batch in stories()],
    ),
    "a fully masked row": (
        *(bert, as_it_is),
        lambda: [batch | {"attention_mask": batch["attention_mask"] * torch.arange(4)[:, None]} for batch in texts()],
    ),
    "masks that say what each token sees": (
        *(causal_lm, as_it_is),
        lambda: [batch | {"attention_mask": torch.ones(4, 1, 8, 8).tril().bool()} for batch in stories()],
    ),
}


@pytest.mark.filterwarnings("ignore:The given model.*:UserWarning")
@pytest.mark.parametrize("name", RIGHT)
def test_it_is_cut_and_saved(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    make, change, rows = RIGHT[name]
    change(model := make())
    batches = rows()
    how = {"modules": ["attention", "mlp"], "criterion": "his", "compensation": None}
    slim = prune(model, batches, budget={"flops": 0.85}, **how)
    assert slim.model.num_parameters() < model.num_parameters()
    slim.save_pretrained(tmp_path / "slim")
    inputs = {key: value for key, value in batches[0].items() if key != "labels"}
    with torch.no_grad():
        expected, found = slim.model.eval()(**inputs).logits, load(tmp_path / "slim")(**inputs).logits
    torch.testing.assert_close(found, expected.to(found.dtype), rtol=1e-4, atol=1e-4)


def with_nan(model: Any) -> None:
    model.bert.encoder.layer[1].intermediate.dense.weight.data[0, 0] = float("nan")


def own_forward(module: nn.Module) -> None:
    before = module.forward

    def forward(*args: Any, **options: Any) -> Any:
        return before(*args, **options)

    module.forward = forward  # type: ignore[method-assign]


def on_meta() -> PreTrainedModel:
    with torch.device("meta"):
        return type(model := bert())(model.config)


def float_norms(model: nn.Module) -> None:
    """Do as training in 8 bits does: norms in float32, the rest in bfloat16."""
    for name, parameter in model.bfloat16().named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()


def tied_by_hand(model: Any) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight


REFUSED: dict[str, tuple[Model, Change, str]] = {
    "compiled forward": (
        *(bert, lambda m: setattr(m, "forward", torch.compile(m.forward, backend="eager"))),
        "forward of its class, but the model has one of its own",
    ),
    "forward of a layer": (
        *(bert, lambda m: own_forward(m.bert.encoder.layer[0].attention)),
        "but bert.encoder.layer.0.attention has one of its own",
    ),
    "NaN": (bert, with_nan, "must be finite, but bert.encoder.layer.1.intermediate.dense.weight of"),
    "no data": (on_meta, as_it_is, "must be in memory, but bert.embeddings.word_embeddings.weight, .* have no data"),
    "dtypes that do not go together": (llama, float_norms, "must run on the calibration rows, .* dtype"),
    "masks of torch.nn.utils.prune": (
        *(bert, lambda m: torch_prune.l1_unstructured(m.classifier, "weight", 0.5)),
        "has classifier.weight_orig and lacks classifier.weight; .*torch.nn.utils.prune.remove",
    ),
    "parametrized": (bert, lambda m: parametrizations.weight_norm(m.classifier), "has .*parametrizations.weight.orig"),
    "another head": (
        bert,
        lambda m: setattr(m, "extra", nn.Linear(48, 2)),
        "its class and config give.*has extra.bias",
    ),
    "layers removed": (bert, partial(drop_a_layer, say_so=False), "lacks bert.encoder.layer.2.attention"),
    "generation config": (
        *(causal_lm, lambda m: m.generation_config.update(do_sample=False, temperature=0.5)),
        "a generation config must be one that transformers saves, .* correct model.generation",
    ),
    "tied by hand": (causal_lm, tied_by_hand, "lm_head.weight .* is model.embed_tokens.weight; set tie_word"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_at_once(name: str) -> None:
    make, change, message = REFUSED[name]
    change(model := make())
    rows = stories() if "CausalLM" in type(model).__name__ else texts()
    with pytest.raises(RequestError, match=message):
        prune(model, rows, criterion="his", budget={"heads": 0.5})


def test_numbers_that_are_none_are_refused_by_the_batch() -> None:
    batches = [image_batch(), image_batch()]
    batches[1]["pixel_values"][0, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        prune(vit(), batches, criterion="his", budget={"heads": 0.5})
