"""Turn what calibration collected into one score per unit; a higher score means keep.

The input is `Statistics` and the name of a criterion, or a model and batches; the output is `Scores`. To add a
criterion, decorate a function with `criterion`.

criteria.py       the criteria by name, `criterion` to register one, `score_units`, and chains of removals in one order
compensated.py    `score_compensated`: greedy removal, taking the refit of the others into account
"""
