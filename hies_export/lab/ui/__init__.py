"""Explore a finished run or sweep in the browser: plans, what they keep and cost, their measured or predicted quality.

The input is the folder that `hies-export run` or `sweep` wrote; the output is a page served on this machine, and the
plans that a reader saves from it. `studies/explore.py` computes what the page shows.

- `app.py`: the controls (Gradio), and what is drawn when they move.
- `guard.py`: refuses requests that are not the page's own.
- `templates/`: what is drawn; tables and figures are those of the report's templates.
"""
