"""Say what every module costs, so that a budget of FLOPs or of time can be met before anything is cut.

In go a dense model, its modules and a batch; out comes a `CostTable` (`select/knapsack.py`): the share of the dense
model's cost that each module saves with 0, 1, 2, ... bundles of units removed. Within a budget, `counts_within` then
chooses the plan that loses the least score, a knapsack.

In the order of reading:

- `flops.py`: FLOPs, which are linear in the units. One cut per module is counted, on tensors without data.
- `latency.py`: time on a runtime, which is not linear. Uniform cuts of the model are timed, their savings shared out
  over the modules as the FLOPs are, and the timed cuts kept in the user's cache folder.
"""
