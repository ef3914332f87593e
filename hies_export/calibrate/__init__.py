"""Run calibration batches through a dense model, and collect what scoring and refitting need.

The input is a model, its `PrunableModule`s and batches. The output is `Statistics` (averages per unit), effects (inputs
and gradients of every consumer) or moments (sums for least squares). The model is restored afterwards.

passes.py     a pass over the rows, or as many as a memory limit makes necessary
statistics.py `Statistics`, and `collect_statistics`: a forward and a backward pass per batch, through gates for "his"
entropy.py    "entropy": entropies of attention rows
readings.py   what consumers read in a batch, with gradients; `EffectStream`, for `score_compensated`
moments.py    `MomentStream`, for `compensate`, and the ridge regression that moments allow
abreast.py    `abreast`: many batches that wait at one layer after the other, for refits layer by layer
"""
