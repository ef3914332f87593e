"""Norms, moments and loss increases against torch.linalg, numpy, and models with columns of zeros."""

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.generative import padded
from support.models import bert, causal_lm, text_batch
from support.neurons import one_by_one
from support.references import layer_tokens
from support.runs import hies
from support.sweeps import save_sweep_project
from support.tolerance import assert_near
from torch import Tensor

from hies_export import Statistics, collect_statistics, find_attention
from hies_export.calibrate.statistics import Calibration
from hies_lab.theory import SHARES, orthogonality, theory


def test_orthogonality_is_that_of_the_vectors_over_all_heads() -> None:
    his = {"a": torch.rand(4).double(), "b": torch.rand(3).double()}
    entropy = {"a": torch.rand(4).double(), "b": torch.rand(3).double()}
    found = orthogonality(Statistics({"his": his, "entropy": entropy}, Calibration(1, "data", "")))
    u, v = (np.concatenate([values["a"], values["b"]]) for values in (his, entropy))
    u = u / u.sum()
    assert found.mean_u == pytest.approx(1 / 7)
    assert found.mean_v == pytest.approx(v.mean())
    assert found.covariance == pytest.approx(np.cov(u, v, bias=True)[0, 1])
    assert found.correlation == pytest.approx(np.corrcoef(u, v)[0, 1])
    assert found.mean_product == pytest.approx(found.covariance + found.mean_u * found.mean_v)
    alike = {"a": torch.ones(4).double(), "b": torch.ones(3).double()}
    same = orthogonality(Statistics({"his": alike, "entropy": entropy}, Calibration(1, "data", "")))
    assert (same.covariance, same.correlation) == (pytest.approx(0), 0)


def loss_of(model: Any, batches: list[dict[str, Tensor]]) -> float:
    """Mean over samples of the model's own loss of each alone."""
    with torch.no_grad():
        losses = [model(**one).loss.item() for one in one_by_one(batches)]
    return sum(losses) / len(losses)


@pytest.mark.parametrize(
    ("kind", "loss", "constant"),
    [
        ("three", "softmax cross-entropy", 0.5),
        ("two", "binary cross-entropy", 0.25),
        ("number", "squared error", 2.0),
        ("text", "softmax cross-entropy", 0.5),
    ],
)
def test_bound_and_increase_equal_loops(kind: str, loss: str, constant: float) -> None:
    if kind == "text":
        model = causal_lm(num_key_value_heads=4)
        batches = [padded([10, 8, 6, 4], "right"), padded([7, 5, 3], "right")]
    else:
        model = bert(num_labels={"number": 1, "two": 2, "three": 3}[kind], num_hidden_layers=2)
        batches = [text_batch(4, 10), text_batch(3, 7)]
        for batch in batches:
            batch["labels"] = torch.randn(len(batch["labels"])) if kind == "number" else batch["labels"] % 2
    sites = find_attention(model, batches[0])
    found = theory(model, batches, sites, alpha=0.5)
    assert found.loss == loss
    statistics = collect_statistics(model, batches, sites)
    # E |A_h|^2: the mean over samples of the mean over real tokens.
    activation = {}
    for site in sites:
        read, _ = layer_tokens(model, site.consumer, batches)
        squares = [x.unflatten(-1, (site.units, -1)).pow(2).sum(-1).mean(0) for x in read]
        activation[site.name] = torch.stack(squares).mean(0)
    for site in sites:
        norms, weight = found.modules[site.name], model.get_submodule(site.consumer).weight.detach().double()
        assert norms.output == pytest.approx(np.linalg.svd(weight, compute_uv=False)[0], rel=1e-5)
        blocks = [np.linalg.svd(b, compute_uv=False)[0] for b in weight.split(site.unit_width, dim=1)]
        assert norms.blocks.tolist() == pytest.approx(blocks, rel=1e-5)
        assert_near(norms.activation, activation[site.name])
        assert_near(norms.deficit, 1 - statistics["entropy"][site.name])
    dense = loss_of(model, batches)
    order = sorted((float(h), name, i) for name, his in statistics["his"].items() for i, h in enumerate(his))
    places = {site.name: site for site in sites}
    for row in (row for row in found.increases if row.criterion == "his"):
        gone: list[tuple[float, str, int]] = []
        for head in order:
            last = sum(name == head[1] for _, name, _ in gone) == places[head[1]].units - 1
            if len(gone) < round(row.share * len(order)) and not last:
                gone.append(head)
        masked = copy.deepcopy(model)
        first = whole = blocks = 0.0
        for his, name, number in gone:
            width = places[name].unit_width
            with torch.no_grad():
                masked.get_submodule(places[name].consumer).weight[:, number * width : (number + 1) * width] = 0
            norms, factor = found.modules[name], constant / 2 * activation[name][number].item()
            first += his
            whole += factor * norms.output**2
            blocks += factor * norms.blocks[number].item() ** 2
        terms = (row.first_order, row.quadratic, row.quadratic_blocks)
        assert terms == pytest.approx((first, whole, blocks), rel=1e-5)
        assert row.measured == pytest.approx(loss_of(masked, batches) - dense, rel=1e-3, abs=1e-5)
    assert [(row.criterion, row.share) for row in found.increases] == [(c, s) for c in ("his", "hies") for s in SHARES]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # Neurons may go too, of which the theory says nothing.
    recipe = save_sweep_project(tmp_path, budget={"flops": 0.7})
    assert hies("sweep", recipe, "--theory", "--json") == 0
    *table, line = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert any("measured increase" in row for row in table)
    assert (len(result["modules"]), len(result["increases"])) == (2, 6)
    assert result["orthogonality"]["mean_u"] == pytest.approx(1 / 12)
    assert hies("sweep", recipe, "--theory", "--set", "prune.modules=[mlp]") == 2
    assert "--theory is about heads, but prune.modules" in capsys.readouterr().err
