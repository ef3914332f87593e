"""Compare and study methods of pruning. hies_export imports nothing from here.

command.py  the command `hies-export sweep`, by an entry point of `hies_export.commands`
sweep/      criteria, alphas, budgets and seeds, compared in tables and on one page
criteria.py criteria for recipes too, by entry points of `hies_export.criteria`
baselines/  methods of other papers, for sweeps
lm_eval.py  benchmarks of lm-evaluation-harness, for the paper's tables
theory.py   the bound of the HIES paper beside the measured loss
"""
