"""Study a model or a finished run without writing a new one.

- `theory.py`: compare the bound of the HIES paper with the measured loss. In go a model, its modules and calibration
  batches; out comes a `Theory`, which `hies-export inspect --theory` prints.
- `explore.py`: predict the quality of plans that were not evaluated. In goes the folder of a finished run or sweep; out
  comes an `Exploration`, which `hies-export ui` shows. No model is loaded.
- `trials.py`: the plans that were evaluated, of any criterion, and what was measured of each.
"""
