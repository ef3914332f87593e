"""How to prune: the section that recipes, `prune` and the command line share, and what its problems are called."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ValidationError, field_validator, model_validator

from ..entry_points import AUTO, RUNTIMES, criterion_names
from ..errors import did_you_mean, one_of, quoted
from ..kinds import ATTENTION, BOTH, KINDS, KindName
from ..recipe.budget import Budget
from ..recipe.sections import CompensationSection, Constraints

# pydantic's kinds of errors that name Python's types -> what a recipe calls them.
_KINDS = {"model_type": "a mapping of fields", "dict_type": "a mapping", "tuple_type": "a list", "path_type": "a path"}


def known_name(name: str, known: Iterable[str], *, what: str) -> str:
    """Return a name that is among the known ones; a ValueError refuses others."""
    if name not in (names := tuple(known)):
        raise ValueError(one_of(what, names, name))
    return name


def _with_known_metric(budget: Budget) -> Budget:
    """Return a budget whose metric is known; where a share of the metric may be kept, it is 0.99 by default."""
    from ..evaluate.metrics import METRICS

    keep, metric = budget.keep, METRICS[known_name(str(budget.metric), METRICS, what="metric")]
    if keep is None or keep.by is not None:
        return budget
    if not (metric.ranks or metric.terms is not None):  # a share can be judged of these alone
        given = "metric" if keep.predictions is None else "predictions and metric"
        raise ValueError(f"keep needs predictions, or metric and by, got {given}")
    share = 0.99 if keep.predictions is None else keep.predictions
    return budget.model_copy(update={"keep": keep.model_copy(update={"predictions": share})})


_Criterion = Annotated[str, AfterValidator(lambda name: known_name(name, criterion_names(), what="criterion"))]


class PruneSection(Constraints):
    """How units are scored, selected and compensated; see `score_units`, `select_units` and `compensate`.

    The budget decides what is not given. A budget of heads asks the paper's question: `modules` are attention,
    `criterion` is HIES, and nothing is refitted. Every other budget asks for a smaller model with the same answers:
    heads and neurons (heads alone, where neurons cannot go), `compensated`, least squares.

    The first fields are constraints on which units go, whatever the budget; see `Constraints`.

    Attributes:
        modules: Which modules lose units: "attention" (heads), "mlp" (feed-forward neurons), or both under one budget.
        criterion: How units are ranked. HIES and other criteria of attention rank only heads; neurons are then ranked
            by `fisher`. `compensated` assumes `compensation`, and uses neither alpha nor labels. If the calibration
            rows have fewer than 16,384 tokens, it also reads compensation rows; see `score_compensated`. `auto` tries
            several criteria: it cuts, refits and judges the choice of each on held-out rows.
        alpha: Weight of importance against focus in HIES, in [0, 1): score = alpha * importance + (1 - alpha) * focus,
            where focus is one minus the attention's entropy. "auto" tries twelve values on held-out rows.
        normalize: Over which heads the two terms of HIES are scaled to [0, 1] before they are blended. "model": over
            all heads, so a layer of weak heads may lose most of them. "layer": over the heads of each layer, so that
            every layer has a head with 0 and one with 1.
        budget: See `Budget`. A recipe's `deploy` chooses how much is removed in place of it. With `vocabulary` and no
            budget, only tokens go.
        towers: The parts of a composite model that lose heads; by default the language model if there is one.
        compensation: See `CompensationSection`; None for no compensation, also where the default is least squares.
    """

    modules: tuple[KindName, ...] = (ATTENTION,)
    criterion: _Criterion = "hies"
    alpha: float | Literal["auto"] = 0.9
    normalize: Literal["model", "layer"] = "model"
    budget: Budget | None = None
    towers: tuple[str, ...] = ()
    compensation: CompensationSection | None = None

    @property
    def goal(self) -> Budget:
        """The budget, which must be given; the section `PruningRecipe.options` always has one."""
        assert self.budget is not None
        return self.budget

    @property
    def judged_on_held_out(self) -> str | None:
        """What is chosen on held-out rows, for messages; None if nothing is, as by a plan in place of a budget."""
        if self.budget is None:
            return None
        if self.budget.searched:
            return self.budget.kind
        if self.criterion == AUTO:
            return "criterion: auto"
        if self.alpha != AUTO:
            return None
        from ..score.criteria import uses_alpha

        return "alpha: auto" if uses_alpha(self.criterion) else None

    @field_validator("modules")
    @classmethod
    def _are_kinds(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or len(set(value)) < len(value):
            raise ValueError(f"modules must be among {' and '.join(KINDS)}, each once, got {list(value)}")
        return tuple(kind for kind in KINDS if kind in value)

    @field_validator("alpha", mode="before")
    @classmethod
    def _is_a_weight(cls, value: Any) -> Any:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if value != "auto" and not (number and 0 <= value < 1):
            raise ValueError(
                f"alpha must be auto or a number in [0, 1), got {value!r}; for importance alone use criterion: his"
            )
        return value

    @field_validator("budget")
    @classmethod
    def _names_a_known_runtime_and_metric(cls, value: Budget | None) -> Budget | None:
        if value is None:
            return value
        if value.timed is not None:
            known_name(value.timed.runtime, RUNTIMES, what="a runtime")
        return value if value.metric is None else _with_known_metric(value)  # which fills in a default share

    @model_validator(mode="after")
    def _suits_the_budget(self) -> PruneSection:
        if self.budget is None or self.budget.heads is None:
            usual = {"modules": BOTH, "criterion": "compensated", "compensation": CompensationSection()}
            # Not added to `model_fields_set`, because a copy with another budget has other defaults.
            vars(self).update({name: value for name, value in usual.items() if name not in self.model_fields_set})
        elif self.modules != (ATTENTION,):
            raise ValueError(
                f"budget.heads is for modules: [attention], got modules: [{', '.join(self.modules)}]; "
                "set budget.flops, parameters, latency or keep, which cover neurons too"
            )
        return self


def sentences(error: ValidationError, recipe: type[BaseModel]) -> Iterator[str]:
    """Yield a sentence for each problem that pydantic found with the fields of a recipe, or of a section."""
    for problem in error.errors():
        where = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            schema = recipe.model_json_schema()
            known = [name for part in (schema, *schema.get("$defs", {}).values()) for name in part["properties"]]
            nearest = did_you_mean(str(problem["loc"][-1]), known) or "; leave it out"
            yield f"{where} is not a field of the recipe{nearest}"
        elif problem["type"] == "missing":
            yield f"{where} must be given"
        elif problem["type"] == "value_error":
            reason = str(problem["ctx"]["error"])
            yield f"{where}: {reason}" if where else reason
        else:
            message = _KINDS.get(problem["type"], problem["msg"].removeprefix("Input should be "))
            yield f"{where} must be {message}, got {quoted(problem['input'])}"
