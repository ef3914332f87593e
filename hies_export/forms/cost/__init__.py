"""Tabulate what every module costs, so that a budget of FLOPs, parameters or time is met before anything is cut.

The input is a dense model, its modules and a batch; the output is a `CostTable` (`select/cost.py`): the share of the
dense model's cost that each module saves with 0, 1, 2, ... bundles of units removed. Bundles are heads, groups of
heads, or neurons; one table holds both kinds, so that one budget covers them. Selection then loses the least within the
budget.

In the order of reading:

- `bundles.py`: FLOPs and parameters, which are linear in the bundles. For FLOPs, cuts of all modules of a kind are
  counted, on tensors without data, and what they save is attributed to the modules.
- `latency.py`: time on a runtime, which is not linear in the units. Uniform cuts of each kind are timed, and their
  savings divided among the modules of that kind in proportion to FLOPs. The timed cuts stay in the user's cache folder.
"""
