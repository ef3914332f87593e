"""Replace consecutive layers by one linear map of the residual stream, and print what is kept.

python bench/linear_maps.py minilm-stsb minilm-sst2 [--layers 1 2 3] [--set FIELD=VALUE ...]

The map and its bias are those of least squares between the input of the first layer and the output of the last, on
the rows that a recipe refits on, with a small ridge. Every run of so many layers is tried and printed. This is
ReplaceMe (https://arxiv.org/abs/2505.02819) without its fold into the layer before, which a norm after the residual sum
(BERT) does not allow. FLOPs are counted at 1 x 128, the map's included.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from depth import recipe_of
from torch import Tensor, nn

from hies_export.data.batches import inputs_of
from hies_export.evaluate.predict import predict
from hies_export.forms.measure.counts import count_flops
from hies_export.pipeline.load_job import load_job

RIDGE = 1e-4  # of the mean square of the inputs


class LinearMap(nn.Linear):
    """A layer whose output is a linear map of its first input."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return super().forward(hidden_states)


class Same(nn.Module):
    """A layer that returns its first input."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return hidden_states


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipes", nargs="+", help="such as minilm-stsb, for recipes/minilm-stsb.yaml")
    parser.add_argument("--layers", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--set", dest="fields", action="append", default=[], help="as of hies-export run")
    options = parser.parse_args()
    for name in options.recipes:
        resolved = load_job(recipe_of(name, options.fields))
        prepared = resolved
        model, batch = prepared.model, next(iter(prepared.shapes.values()))
        judge = resolved.judge(resolved.rows.evaluation)
        dense = judge.of(judge.dense).metrics
        print(f"\n## {name}; dense: {', '.join(f'{key} {value:.4f}' for key, value in dense.items())}\n")
        print(f"| layers replaced | same answers | {' | '.join(dense)} | FLOPs |\n|{' --- |' * (3 + len(dense))}")
        states = states_of(model, prepared.rows.refit)
        for count in options.layers:
            for first in range(len(states) - count):
                slim = replaced(model, first, count, least_squares(states[first], states[first + count]))
                found = judge.of(predict(slim, judge.batches))
                cells = [f"{first} to {first + count - 1}", f"{100 * found.stability:.1f} %"]
                cells += [f"{value:.4f}" for value in found.metrics.values()]
                share = count_flops(slim, batch) / count_flops(model, batch)
                print(f"| {' | '.join([*cells, f'{share:.3f}'])} |", flush=True)


def layers_of(model: Any) -> nn.ModuleList:
    """Return the layers of a model, its longest list of modules."""
    return max((part for part in model.modules() if isinstance(part, nn.ModuleList)), key=len)


def states_of(model: Any, batches: list[dict[str, Any]]) -> list[Tensor]:
    """Return the residual stream before each layer and after the last, (tokens, width), without padding."""
    layers, mask = layers_of(model), torch.empty(0)
    found: list[list[Tensor]] = [[] for _ in range(len(layers) + 1)]

    def before(place: int) -> Any:
        return lambda module, args: found[place].append(args[0][mask])

    hooks = [layer.register_forward_pre_hook(before(place)) for place, layer in enumerate(layers)]
    hooks.append(layers[-1].register_forward_hook(lambda module, args, output: found[-1].append(output[mask])))
    with torch.no_grad():
        for batch in batches:
            mask = batch["attention_mask"].bool()
            model(**inputs_of(batch))
    for hook in hooks:
        hook.remove()
    return [torch.cat(parts) for parts in found]


def least_squares(inputs: Tensor, outputs: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weight and the bias of the linear map from inputs to outputs, both (tokens, width)."""
    x, y = inputs.double(), outputs.double()
    mean, target = x.mean(0), y.mean(0)
    x, y = x - mean, y - target
    moments = x.T @ x
    moments.diagonal().add_(RIDGE * moments.diagonal().mean())
    weight = torch.linalg.solve(moments, x.T @ y).T
    return weight.float(), (target - weight @ mean).float()


def replaced(model: Any, first: int, count: int, mapped: tuple[Tensor, Tensor]) -> Any:
    """Return a copy of a model, with some layers replaced by one linear map."""
    slim = copy.deepcopy(model)
    layers, (weight, bias) = layers_of(slim), mapped
    layers[first] = LinearMap(len(bias), len(bias))
    layers[first].weight.data, layers[first].bias.data = weight, bias
    for place in range(first + 1, first + count):
        layers[place] = Same()
    return slim.eval()


if __name__ == "__main__":
    main()
