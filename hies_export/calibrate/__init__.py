"""Run calibration batches through a dense model, and collect what scoring and refitting need.

The input is a model, its `PrunableModule`s and batches. The output is `Statistics` (averages per unit), effects (inputs
and gradients of every consumer) or moments (sums for least squares). The model is restored afterwards.

collect.py    `collect_statistics`: one forward and one backward pass per batch
gates.py      "his": gradients to a gate of one on every unit's output
entropy.py    "entropy": entropies of attention rows
inputs.py     "activation_l2", "output_norm" and "obs": sums over the inputs of consumers
weights.py    "weight_l2", "taylor" and "channel_taylor": sums over weights and their gradients
effects.py    `EffectStream`, for `score_compensated`
moments.py    `MomentStream`, for `compensate`
abreast.py    `abreast`: many batches that wait at one layer after the other, for refits layer by layer
ridge.py      `Moments`, and the ridge regression that they allow
sums.py       `LayerMoments`: running sums, from which moments follow for any weight of the tokens
readings.py   inputs of the consumers in a batch, and the gradients of each sample's prediction there
rounding.py   `fit_blocks`: round a layer to few levels so that its outputs change least
spreads.py    means and second moments of what any linear layers read, in torch or in a graph
stream.py     groups of modules under a memory limit, with a pass over the data for each
"""
