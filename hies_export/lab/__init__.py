"""Compare and study methods of pruning; what ships imports nothing from here.

sweep/      criteria, alphas, budgets and seeds, compared in tables and figures
baselines/  methods of other papers, for sweeps
studies/    the theory of a model's heads
"""
