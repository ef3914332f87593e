"""Find the part of a folder that a command needs."""

from __future__ import annotations

from pathlib import Path

from ..checkpoint.folders import Contents, contents, refuse_other
from ..errors import PlanError, RequestError
from ..progress import Progress


def checkpoint_in(path: str, *welcome: Contents, progress: Progress) -> str:
    """Return the checkpoint that a path stands for: the path itself, or `slim/` in the folder of a run."""
    slim = Path(path) / "slim"
    if contents(path) is Contents.RUN and (slim / "config.json").is_file():
        progress.stage(f"{path} is {Contents.RUN.value}: using its slim/")
        return str(slim)
    wanted = ", ".join(("a checkpoint", *(what.value for what in welcome)))
    refuse_other(path, *welcome, must=f"the model must be {wanted} or the folder of a run")
    return path


def plan_in(path: Path, *, progress: Progress) -> Path:
    """Return the plan file that a path stands for: itself, or the plan in the folder of a run or slim checkpoint."""
    for name in ("plan.json", "hies_plan.json"):
        if (path / name).is_file():
            progress.stage(f"{path} is {contents(path).value}: using its {name}")
            return path / name
    if not path.is_file():
        raise PlanError(f"a plan must be a plan.json or the folder of a run, but {path} is {contents(path).value}")
    return path


def refuse_other_than(path: str | Path, *wanted: Contents, needs: str) -> None:
    """Refuse a path that does not hold what is wanted; name a nearby one that does."""
    found = contents(path)
    if found not in wanted:
        near = next((p for p in (Path(path).parent, Path(path) / "run") if contents(p) in wanted), None)
        raise RequestError(f"{needs}, but {path} is {found.value}" + (f"; give {near}" if near else ""))
