"""Turn what calibration collected into one score per unit; a higher score means keep.

In go `Statistics` and the name of a criterion, or a model and batches, out come `Scores`. To add a criterion, decorate
a function with `criterion`.

criteria.py       the criteria by name, `criterion` to register one, and `score_units`
normalize.py      min-max normalisation over the model or over each module
compensated.py    `score_compensated`: greedy removal, taking the refit of the others into account
"""
