"""Tabulate what every module costs, so that a budget of FLOPs or time is met before anything is cut.

In go a dense model, its modules and a batch; out comes a `CostTable` (`select/budget.py`): the share of the dense
model's cost that each module saves with 0, 1, 2, ... bundles of units removed. `counts_within` then solves a knapsack:
it removes the lowest total score that meets the budget.

In the order of reading:

- `flops.py`: FLOPs, which are linear in the units. One cut per module is counted, on tensors without data.
- `latency.py`: time on a runtime, which is not linear in the units. Uniform cuts of the whole model are timed, and
  their savings divided among the modules in proportion to FLOPs. The timed cuts stay in the user's cache folder.
"""
