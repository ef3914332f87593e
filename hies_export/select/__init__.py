"""Choose the units that stay, within a budget and constraints.

In go `Scores` and the `Units` of every module, out comes a `Selection`. A budget is a share of the heads, or a share of
the dense model's cost (FLOPs or latency).

bundles.py        which units go together: whole groups, or one unit of every group
constraints.py    `Constraints`, and the check that a budget can be met
select.py         `select_units`: the greatest total score for a share of heads, or for given counts
knapsack.py       an exact solver for the multiple-choice knapsack
budget.py         `counts_within`: how many bundles each module loses within a budget of cost
iterative.py      the same budget in several rounds, each scored on the model that the last one left
"""
