"""Remove units from a model in memory, check the cut, and refit what is left.

The input is a dense model and a `PruningPlan` or `Selection`; the output is a slim `PreTrainedModel`.

cut.py     `prune_units`: the removal itself
config.py  how a config describes what is left: a stock one, a Mistral's for a LLaMA, or one with a slim class
check.py   `masked_units`, the same removal by zeros; and `compare_cut`
bundles.py what every bundle of heads or neurons costs, in FLOPs and parameters, for budgets that count them
refit.py   `compensate`: refit the consumers by least squares, without training
certainty.py  `fit_logit_scale`: make a language model as certain as the dense one
"""
