"""Remove units from a model in memory, check the cut, and refit what is left.

In go a dense model and a `PruningPlan` or `Selection`, out comes a slim model: an ordinary `PreTrainedModel`.

mask.py      `masked_units`: the same removal by multiplying with zero, as a reference
cut.py       `prune_units`: the removal itself
uniform.py   a config whose plain fields describe a uniformly cut model
siblings.py  the stock families that compute what another one does, and take results that its config refuses
config.py    a config with a `hies_export` block, and a slim class, for all others
per_layer.py what that block says of each layer, in the schema of transformers
check.py     whether a plan fits a model, and `compare_cut`: the cut model against the masked one
fingerprint.py  whether a plan was made for these weights
refit.py     `compensate`: refit the consumers by least squares, without training
"""
