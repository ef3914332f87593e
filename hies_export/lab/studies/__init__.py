"""Study a model or a finished run without writing a new one.

- `theory.py`: compare the bound of the HIES paper with the measured loss. From a model, its modules and calibration
batches it makes a `Theory`, which `hies-export inspect --theory` prints.
- `explore.py`: predict the quality of plans that were not evaluated. From the folder of a finished run or sweep it
makes an `Exploration`, which `hies-export ui` shows. No model is loaded.
"""
