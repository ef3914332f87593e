"""Study a model.

- `theory.py`: compare the bound of the HIES paper with the measured loss. From a model, its modules and calibration
batches it makes a `Theory`, which `hies-export inspect --theory` prints.
"""
