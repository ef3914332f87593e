"""Walk calibration batches through a dense model, block by block, and collect what scoring and refitting need.

The input is a model, its `PrunableModule`s and batches. The output is `Statistics` (averages per unit), effects (inputs
and gradients of every consumer) or moments (sums for least squares). The model is restored afterwards.

walk.py       `Walk`: all batches wait in front of a block until it was read, changed or run, forward and backward
readings.py   what consumers read in a block, with gradients (`Gradients`); effects, for `score_compensated`
statistics.py `Statistics`, and `collect_statistics`
entropy.py    "entropy": entropies of attention rows
moments.py    moments, for `compensate`, and the ridge regression that they allow
residual.py   where to read the residual stream that a layer adds to, for refits layer by layer
"""
