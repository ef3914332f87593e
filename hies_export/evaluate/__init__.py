"""Measure the quality of a pruned model: metrics, and agreement with the dense model.

The input is a model, dense or slim, and batches from `data`. The output is `Quality` (metrics and stability) or
`Judgement` (one metric with its standard error, and stability). In the order of reading:

- `predict.py` runs a model over batches and keeps logits, or the likeliest tokens and their likelihoods.
- `ranking.py` ranks documents by embeddings, or candidates by a reranker.
- `metrics.py` is the registry of metrics, plain functions of numpy arrays, and loads those of the `evaluate` library.
- `interval.py` bounds what is kept, and `promise.py` words it.
- `judge.py` applies metrics to predictions, and holds the dense model's predictions to compare others with.
"""
