"""Remove units from a model in memory, check the cut, and refit what is left.

The input is a dense model and a `PruningPlan` or `Selection`; the output is a slim model, an ordinary
`PreTrainedModel`.

mask.py      `masked_units`: the same removal by multiplying with zero, as a reference
cut.py       `prune_units`: the removal itself
uniform.py   a config whose plain fields describe a uniformly cut model
siblings.py  stock families that compute the same as another one, and accept cuts that its config refuses
config.py    a config with a `hies_export` block, and a slim class, for all others
skip.py      how an attention module that loses all heads is skipped
per_layer.py the numbers of each layer in that block, in the schema of transformers
check.py     check that a plan fits a model, and `compare_cut`: the cut model against the masked one
fingerprint.py  check that a plan was made for these weights
refit.py     `compensate`: refit the consumers by least squares, without training
"""
