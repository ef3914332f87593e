"""Print what runs of `hies-export deploy` answered, one row each.

python bench/answers.py RUN...

Time is relative to the dense model in the first form, float32 on ONNX Runtime, with the 95 % interval of the ratio; the
control is the same for a second copy of that form.
"""

from __future__ import annotations

import sys
from pathlib import Path

from hies_export.forms.judged import Judged
from hies_export.report.report import Report


def main() -> None:
    print(
        "| run | promise | answer | file | FLOPs | held out | at least | evaluated | rows | times | control | minutes |"
    )
    print("|" + " --- |" * 12)
    for folder in map(Path, sys.argv[1:]):
        report = Report.from_file(folder)
        found, forms = report.details.deployment, report.details.forms
        if found is None or found.form is None:
            raise SystemExit(f"{folder} is of no deployment, or none kept its promise")
        form = forms[found.form]
        cells = [
            f"{Path(report.model).name}",
            f"{100 * found.promise:g} %",
            f"{form.model} {form.bits}, {form.runtime}",
            f"{found.file}, {(form.bytes or 0) / 1e6:.2f} MB",
            "1" if form.model == "dense" else f"{report.flops.ratio:.3f}",
            f"{100 * (form.kept or 0):.2f} %",
            f"{100 * (form.at_least or 0):.2f} %",
            f"{100 * form.stability:.2f} %",
            f"{report.details.data.held_out_samples:,}, {report.details.data.evaluation_samples:,}",
            times(form) if found.form else "1",
            times(forms[0]),
            f"{found.seconds / 60:.1f}",
        ]
        print(f"| {' | '.join(cells)} |")


def times(form: Judged) -> str:
    """Return the ratio of a form at every shape."""
    return "; ".join(
        f"{at.batch} x {at.sequence}{'' if at.phase == 'forward' else ' ' + at.phase} "
        f"{at.ratio:.3f} [{at.ratio_low:.3f}, {at.ratio_high:.3f}]{'*' * at.noisy}"
        for at in form.times
    )


if __name__ == "__main__":
    main()
