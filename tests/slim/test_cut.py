"""What a cut keeps and refuses; that it holds for every architecture is in test_architectures.py."""

import copy
import pickle

import torch
from support.cuts import random_cut, random_neurons
from support.families import decoder
from support.models import bert, text_batch
from support.tolerance import assert_near

from hies_export import find_modules, prune_units
from hies_export.slim.check import first_output

gpt_oss = decoder("GptOss", head_dim=8, num_local_experts=2, num_experts_per_tok=1)


def test_slim_models_can_be_copied_and_pickled() -> None:
    dense, batch = bert(), text_batch()
    slim, _, _ = random_cut(dense, batch)
    for other in (copy.deepcopy(slim), pickle.loads(pickle.dumps(slim))):
        assert type(other) is type(slim)
        assert_near(first_output(other, batch), first_output(slim, batch))


def test_layers_with_the_weight_of_a_cut_one_are_cut_too() -> None:
    model, batch = bert(), text_batch(labels=False)
    made = model.bert.encoder.layer[0].intermediate.dense
    model.other = torch.nn.Linear(made.in_features, made.out_features)
    model.other.weight, model.other.bias = made.weight, made.bias
    modules = find_modules(model, batch, kinds=("mlp",))
    slim = prune_units(model, random_neurons(modules, uniform=False), modules)
    cut = slim.bert.encoder.layer[0].intermediate.dense
    assert slim.other.weight is cut.weight
    assert len(cut.weight) < len(made.weight) == len(model.other.weight)
