"""Pruning in steps: against a loop over masked models, sample by sample, and the rounds by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.cuts import plan_of
from support.models import causal_lm, llama, save_project, text_batch
from support.references import naive_statistics
from torch import Tensor

from hies_export import Constraints, PruningRecipe, compensate, find_attention, load, prune_units, select_units
from hies_export.cli.main import main
from hies_export.errors import PlanError, RecipeError
from hies_export.pipeline.choose import choose
from hies_export.pipeline.load_job import load_job
from hies_export.pipeline.stages import calibrate
from hies_export.score.criteria import Scores
from hies_export.select.constraints import bundles_lost
from hies_export.select.cost import Goal, compose, head_totals, heads_to_go
from hies_export.select.plan import PruningPlan
from hies_export.units.units import Kept, Units


def naive_his(model: Any, sites: Any, batches: list[dict[str, Tensor]], gone: set[tuple[str, int]]) -> dict[Any, float]:
    """Mean over samples of |dL/dm| of every head, with the gone ones at m = 0; one sample at a time."""
    handles = []
    for site in sites:
        there = torch.tensor([float((site.name, head) not in gone) for head in range(site.units)])
        layer, wide = model.get_submodule(site.consumer), there.repeat_interleave(site.unit_width)
        handles.append(layer.register_forward_pre_hook(lambda _, x, wide=wide: (x[0] * wide,)))
    his = naive_statistics(model, batches, sites)["his"]
    for handle in handles:
        handle.remove()
    return {(name, head): value for name, values in his.items() for head, value in enumerate(values.tolist())}


def recipe_of(folder: Path, **prune: Any) -> PruningRecipe:
    if not (folder / "recipe.yaml").exists():
        save_project(
            folder,
            train=60,
            validation=8,
            calibration={"samples": 12, "batch_size": 5},
            prune={"criterion": "his", "budget": {"heads": 0.5}},
            measure={"shapes": [[2, 16]], "runtimes": ["torch"]},
        )
    return PruningRecipe.from_yaml(folder / "recipe.yaml", {f"prune.{key}": value for key, value in prune.items()})


def test_a_plan_in_steps_is_that_of_a_loop(tmp_path: Path) -> None:
    plans = {}
    for steps in (1, 3, 18):
        recipe = recipe_of(tmp_path, steps=steps)
        prepared = load_job(recipe)
        choice = choose(prepared, calibrate(prepared))
        gone: set[tuple[str, int]] = set()
        found: dict[tuple[str, int], float] = {}
        sizes = [9] if steps == 1 else [3, 6, 9] if steps == 3 else list(range(1, 10))
        for size in sizes:
            his = naive_his(prepared.model, prepared.modules, prepared.rows.score, gone)
            found |= {key: value for key, value in his.items() if key not in gone}
            for name, head in sorted(his, key=his.__getitem__):
                left = 6 - sum(other == name for other, _ in gone)
                if len(gone) < size and (name, head) not in gone and left > 1:
                    gone.add((name, head))
        kept = {s.name: tuple(h for h in range(6) if (s.name, h) not in gone) for s in prepared.modules}
        assert {name: part.units for name, part in choice.plan.kept.items()} == kept
        # Every head's number is that of the last step it was there for.
        numbers = {
            (name, h): float(v) for name, values in choice.statistics["his"].items() for h, v in enumerate(values)
        }
        assert numbers == pytest.approx(found, rel=1e-3, abs=1e-7)
        plans[steps] = kept
    assert plans[1] != plans[18]


def test_heads_are_cut_in_steps_with_refits_and_alpha_chosen(tmp_path: Path) -> None:
    recipe_of(tmp_path)
    options = ["prune.steps=2", "prune.criterion=hies", "prune.alpha=auto", "prune.compensation={samples: 40}"]
    extra = [part for option in options for part in ("--set", option)]
    assert main(["prune", str(tmp_path / "recipe.yaml"), *extra]) == 0
    plan = PruningPlan.from_file(tmp_path / "out" / "hies_plan.json")
    assert (plan.heads, plan.removed) == (18, 9)
    slim = load(tmp_path / "out")
    widths = [slim.get_submodule(name).query.out_features for name in plan.kept]
    assert widths == [8 * len(kept.units) for kept in plan.kept.values()]


@pytest.mark.filterwarnings("ignore::hies_export.slim.refit.FewTokensWarning")
def test_later_steps_see_the_refitted_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = recipe_of(tmp_path, steps=2, compensation={"samples": 40})
    seen: list[Any] = []
    from hies_export.pipeline import stages as module

    collect = module.collect_statistics

    def watched(model: Any, *args: Any, **options: Any) -> Any:
        seen.append(model)
        return collect(model, *args, **options)

    monkeypatch.setattr(module, "collect_statistics", watched)
    prepared = load_job(recipe)
    choose(prepared, calibrate(prepared))
    first, second = seen
    assert first is prepared.model
    one = recipe_of(tmp_path, budget={"heads": 4 / 18})
    prepared = replace(prepared, options=one.options)
    plan = choose(prepared, calibrate(prepared)).plan
    expected = prune_units(prepared.model, plan, prepared.modules)
    compensate(prepared.model, expected, plan, prepared.modules, prepared.rows.refit)
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(second.get_parameter(name), parameter)


@pytest.mark.parametrize("make", [llama, causal_lm])
@pytest.mark.parametrize("allocation", ["global", "uniform"])
def test_sizes_add_up_and_plans_compose(make: Any, allocation: str) -> None:
    model = make(num_attention_heads=8, num_key_value_heads=4)
    batch = text_batch(2, 8, labels=False)
    batch["input_ids"] %= 32
    sites = find_attention(model, batch)
    constraints = Constraints(allocation=allocation)
    once = plan_of(random_scores(sites), sites, heads=0.5, allocation=allocation)
    for count in (2, 5):
        slim, plan, now = model, None, sites
        for total in head_totals(sites, heads=0.5, count=count, constraints=constraints):
            lost = {} if plan is None else bundles_lost(plan, sites, unit="group")
            goal = heads_to_go(sites, total, lost, unit="group")
            how = {"heads": goal.heads, "counts": goal.counts, "constraints": constraints}
            new = select_units(random_scores(now), now, **how)
            plan = new if plan is None else compose(plan, new)
            after = prune_units(slim, new, now)
            # Cutting twice is cutting once by the plan of both.
            for name, parameter in prune_units(model, plan, sites).named_parameters():
                assert torch.equal(parameter, after.get_parameter(name))
            slim, now = after, find_attention(after, batch)
        assert plan is not None
        assert sum(len(kept.removed) for kept in plan.values()) == once.removed
        if allocation == "uniform":
            assert len({len(kept.units) for kept in plan.values()}) == 1


def random_scores(sites: Any) -> Scores:
    return Scores("random", {}, {s.name: torch.rand(s.units, dtype=torch.float64) for s in sites})


@pytest.mark.parametrize(
    ("prune", "given"),
    [
        ({"budget": {"keep": {"metric": "accuracy", "by": 0.1}}}, "a budget of keep"),
        ({"budget": {"heads": 0.5}, "multiple_of": 2, "unit": "query"}, "multiple_of 2 and unit query"),
    ],
)
def test_other_budgets_take_no_steps(prune: dict[str, Any], given: str) -> None:
    data = {"files": {"train": "a.jsonl"}, "text": "sentence"}
    with pytest.raises(
        RecipeError, match=f"steps: 2 needs a budget of heads or of cost in units of groups, got {given}; set"
    ):
        PruningRecipe(model="m", task="text-classification", data=data, prune={"steps": 2, **prune})


MODULES = (Units(name="a", units=8), Units(name="b", units=4))
GROUPED = (Units(name="g", units=12, groups=4),)


def rounds(share: float, count: int, **constraints: object) -> list[int | list[int]]:
    return [*head_totals(MODULES, heads=share, count=count, constraints=Constraints(**constraints))]  # type: ignore[arg-type]


def test_rounds_remove_equal_shares_of_all_modules() -> None:
    assert rounds(0.5, 3) == [2, 4, 6]
    assert rounds(0.5, 1) == [6]


def test_rounds_that_would_remove_nothing_are_left_out() -> None:
    # 24 rounds of half a head: those that round to nothing, or to what was removed before, do not appear.
    assert rounds(0.5, 24) == [1, 2, 3, 4, 5, 6]
    # Of 8 and of 4: 0.8, 1.6, 2.4, 3.2 and 4 heads; 0.4, 0.8, 1.2, 1.6 and 2.
    assert rounds(0.5, 5, allocation="uniform") == [[1, 0], [2, 1], [3, 2], [4, 2]]


def test_a_budget_that_cannot_be_met_is_refused_in_the_last_round() -> None:
    with pytest.raises(PlanError, match="must remove at least one head, but heads: 0.01 of 12 rounds to none"):
        rounds(0.01, 3)
    # The first rounds fit; only all of it does not.
    found = head_totals(MODULES, heads=0.9, count=2, constraints=Constraints(min_heads=2))
    assert next(found) == 5
    with pytest.raises(PlanError, match="remove 11 of 12 heads, but min_heads 2 leave only 8"):
        next(found)


def test_the_size_of_a_round_is_counted_on_the_model_that_is_left() -> None:
    # 6 of 12 in all, and 3 of them are gone.
    assert heads_to_go(MODULES, 6, {"a": 3}, unit="group") == Goal(heads=3 / 9)
    assert heads_to_go(MODULES, [4, 2], {"a": 3}, unit="group") == Goal(counts=[1, 2])
    # Of three query heads in each group, one is gone.
    assert heads_to_go(GROUPED, 2, {"g": 1}, unit="query") == Goal(heads=1 / 2)
    assert heads_to_go(GROUPED, [2], {"g": 1}, unit="query") == Goal(counts=[1])
    assert next(head_totals(GROUPED, heads=0.7, count=2, constraints=Constraints(unit="query"))) == 1


def test_units_are_numbered_as_in_the_first_model() -> None:
    first = {"a": Kept((0, 1, 2, 6, 7, 8), 12, 4), "b": Kept((0, 1, 2, 3), 4), "m": Kept((1, 3, 5, 7), 8, kind="mlp")}
    second = {"a": Kept((3, 4, 5), 6, 2), "b": Kept((1, 3), 4), "m": Kept((0, 2), 4, kind="mlp")}
    assert compose(first, second) == {
        "a": Kept((6, 7, 8), 12, 4, "attention"),
        "b": Kept((1, 3), 4),
        "m": Kept((1, 5), 8, 8, "mlp"),
    }
