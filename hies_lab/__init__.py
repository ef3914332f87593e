"""Compare and study methods of pruning. hies_export imports nothing from here.

command.py  the command `hies-export sweep`, by an entry point of `hies_export.commands`
sweep/      criteria, alphas, budgets and seeds, compared in tables and on one page
baselines/  methods of other papers, for sweeps
theory.py   the bound of the HIES paper beside the measured loss
"""
