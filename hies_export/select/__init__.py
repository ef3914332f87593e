"""Choose the units that stay, within a budget and constraints.

The input is `Scores` and the `Units` of every module; the output is a `Selection`. A budget is a share of the heads, or
a share of the dense model's cost (FLOPs, parameters or latency).

select.py         `select_units`, for every budget
constraints.py    which units go together, what `Constraints` allow, and the check that a budget of heads can be met
cost.py           `CostTable`, what bundles save, the check that a budget of cost can be met, and its rounds
fingerprint.py    whether a plan is for the weights that it is applied to
joint.py          one budget of cost for several kinds, or for chains of removals, and the knapsack behind it
"""
