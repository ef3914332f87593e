"""Heads and neurons under one budget: against the best of all choices, and against rules that a choice must keep."""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from hies_export import Constraints, PlanError, RecipeError, Scores, Selection, select_units
from hies_export.score.criteria import Chain, Removal
from hies_export.select import joint
from hies_export.select.constraints import NONE
from hies_export.select.cost import CostTable, lowest_ratio
from hies_export.select.joint import chains_of
from hies_export.units.units import Units


def heads(name: str, units: int, *, groups: int = 0) -> Units:
    return Units(name=name, units=units, groups=groups)


def block(name: str, units: int) -> Units:
    return Units(name=name, units=units, kind="mlp")


def table_of(modules: Sequence[Units], price: Mapping[str, float]) -> CostTable:
    """Return a table in which every unit of a kind costs as much, and everything but units is free."""
    total = sum(price[m.kind] * m.units for m in modules)
    saved = {m.name: [price[m.kind] * m.group_size * k / total for k in range(m.groups + 1)] for m in modules}
    return CostTable("FLOPs", {name: tuple(row) for name, row in saved.items()})


PRICE = {"attention": 6.0, "mlp": 1.0}


def effects_of(modules: Sequence[Units], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    most = {"attention": 20.0, "mlp": 1.0}
    return {m.name: most[m.kind] * torch.rand(m.units, generator=generator, dtype=torch.float64) ** 3 for m in modules}


def scores_of(effects: Mapping[str, torch.Tensor], *, ranked: tuple[str, ...] = ()) -> Scores:
    return Scores("fisher", {}, effects, effects, ranked)


def chosen(effects: Mapping[str, torch.Tensor], modules: Sequence[Units], ratio: float, **how: Any) -> Selection:
    """Return what stays when units of these effects, and of the usual prices, are removed."""
    return select_units(scores_of(effects), modules, table=table_of(modules, PRICE), ratio=ratio, **how)


def cost(selection: Selection, modules: Sequence[Units]) -> float:
    kept = sum(PRICE[m.kind] * len(selection[m.name].units) for m in modules)
    return kept / sum(PRICE[m.kind] * m.units for m in modules)


def lost(selection: Selection, effects: Mapping[str, torch.Tensor]) -> float:
    return sum(effects[name][list(kept.removed)].sum().item() for name, kept in selection.items())


@pytest.fixture(params=[True, False], ids=["exact", "by slopes"])
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the choice is exact, as it is for few options, or goes by slopes."""
    if not request.param:
        monkeypatch.setattr(joint, "MOST_OPTIONS", 0)
    return bool(request.param)


SMALL = (heads("a0", 3), heads("a1", 2), block("m0", 4), block("m1", 4))
LARGE = tuple(m for i in range(3) for m in (heads(f"a{i}", 8), block(f"m{i}", 40)))


TIED = (heads("a0", 4), heads("a1", 4), block("m0", 3), block("m1", 5))
# 3 and 5 neurons lose a share of each of 0 to 4 fifths, as `uniform` rounds it.
SHARES = {"attention": {(k, k) for k in range(4)}, "mlp": {(0, 0), (1, 1), (1, 2), (2, 3), (2, 4)}}

# What all of them lose for a share of 0 to 4 fifths.
ALIKE = {(0, 0, 0, 0), (1, 1, 1, 1), (2, 2, 1, 2), (2, 2, 2, 3), (3, 3, 2, 4)}


def timings(seed: int) -> CostTable:
    """Return a table like one of measured times: steps of all sizes, and sometimes a smaller layer that is slower."""
    draw = random.Random(seed)
    rows = {m.name: [0, *(draw.randint(-3, 12) for _ in range(m.units - 1))] for m in SMALL}
    return CostTable("latency", {name: tuple(k / 200 for k in itertools.accumulate(row)) for name, row in rows.items()})


class Case(NamedTuple):
    """Modules and constraints, whether these allow to lose so many units of each, and what is ranked or timed."""

    modules: tuple[Units, ...]
    constraints: Constraints = NONE
    allowed: Callable[[tuple[int, ...]], bool] = lambda lost: True
    ranked: tuple[str, ...] = ()
    timed: bool = False


def tied(ranked: tuple[str, ...] = (), **allocation: str) -> Case:
    def allowed(lost: tuple[int, ...]) -> bool:
        of = {"attention": lost[:2], "mlp": lost[2:]}
        return all(of[kind] in SHARES[kind] for kind, how in allocation.items() if how == "uniform")

    return Case(TIED, Constraints(allocation=allocation), allowed, ranked)


CASES = {
    "none": Case(SMALL),
    "min_heads": Case(SMALL, Constraints(min_heads=2), lambda lost: lost[0] < 2 and not lost[1]),
    "keep_layers": Case(SMALL, Constraints(keep_layers=(0,)), lambda lost: not (lost[0] or lost[2])),
    "the last layer kept": Case(SMALL, Constraints(keep_layers=(-1,)), lambda lost: not (lost[1] or lost[3])),
    "multiples": Case(
        (heads("a0", 4), heads("a1", 2), block("m0", 4), block("m1", 4)),
        Constraints(multiple_of={"heads": 2, "neurons": 2}),
        lambda lost: all(count % 2 == 0 for count in lost),
    ),
    "heads alike": tied(attention="uniform", mlp="global"),
    "heads alike, neurons as by default": tied(attention="uniform"),
    "neurons alike": tied(mlp="uniform"),
    "kinds alike": tied(attention="uniform", mlp="uniform"),
    "one share of all": Case(TIED, Constraints(allocation="uniform"), ALIKE.__contains__),
    "both global": tied(attention="global", mlp="global"),
    "ranked heads alike": tied(("attention",), attention="uniform"),
    "ranked heads and neurons alike": tied(("attention",), attention="uniform", mlp="uniform"),
    "ranked heads": Case(SMALL, ranked=("attention",)),
    "times": Case(SMALL, timed=True),
    "times, ranked heads": Case(SMALL, ranked=("attention",), timed=True),
}


def all_choices(case: Case, effects: Mapping[str, torch.Tensor], table: CostTable) -> list[tuple[float, float]]:
    """Return the cost that is left, and the effect, of every selection that goes by effects and keeps what it must."""
    orders = [[(effect, m.name) for effect in effects[m.name].sort().values.tolist()[:-1]] for m in case.modules]
    if case.ranked and case.constraints == NONE:  # heads leave in one order, which is of the first two modules
        orders = [sorted(orders[0] + orders[1]), *orders[2:]]
    found = []
    for taken in itertools.product(*(range(len(order) + 1) for order in orders)):
        removed = [one for order, count in zip(orders, taken, strict=True) for one in order[:count]]
        lost = Counter(name for _, name in removed)
        if case.allowed(tuple(lost[m.name] for m in case.modules)):
            found.append((round(table.ratio(lost), 9), sum(effect for effect, _ in removed)))
    return found


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("seed", range(3))
def test_no_other_choice_loses_less(case: Case, seed: int, exact: bool) -> None:
    modules, constraints, effects = case.modules, case.constraints, effects_of(case.modules, seed)
    table = timings(seed) if case.timed else table_of(modules, PRICE)
    scores = scores_of(effects, ranked=case.ranked)
    choices = all_choices(case, effects, table)
    costs = sorted({cost for cost, _ in choices})
    if not (case.timed and case.ranked):  # in one order, modules may not be fastest together
        assert lowest_ratio(modules, table, constraints) == pytest.approx(costs[0])
    for place in (0, len(costs) // 10, len(costs) * 2 // 5, len(costs) * 3 // 4):
        # A little less than a cost that choices have, which its rounding must not let pass.
        ratio = costs[place + 1] - 1e-6
        found = select_units(scores, modules, table=table, ratio=ratio, constraints=constraints)
        assert table.left(found, modules, unit="group") <= ratio + 1e-9
        assert case.allowed(tuple(len(kept.removed) for kept in found.values()))
        best = min(loss for cost, loss in choices if cost <= ratio)
        assert lost(found, effects) == pytest.approx(best) if exact else lost(found, effects) >= best - 1e-9
        assert [(kept.kind, kept.total) for kept in found.values()] == [(m.kind, m.units) for m in modules]
    with pytest.raises(PlanError, match="the budget asks for"):
        select_units(scores, modules, table=table, ratio=costs[0] - 0.004, constraints=constraints)


def test_the_order_of_chains_decides_within_a_uniform_kind() -> None:
    modules = (heads("a", 2), heads("b", 2), block("m", 2))
    # One chain over all modules, as FLAP's, and against the order of the scores.
    steps = [("b", 1, 1.0), ("m", 0, 2.0), ("a", 1, 3.0), ("m", 1, 9.0), ("a", 0, 10.0), ("b", 0, 11.0)]
    chain = tuple(Removal(name, (unit,), effect) for name, unit, effect in steps)
    scores = Scores("flap", {}, {m.name: torch.arange(2.0) for m in modules}, chains=(chain,))
    table = table_of(modules, PRICE)
    constraints = Constraints(allocation={"attention": "uniform"})
    kept = []
    for ratio in (0.99, 0.9, 13.5 / 26):
        found = select_units(scores, modules, table=table, ratio=ratio, constraints=constraints)
        kept.append(tuple(of.units for of in found.values()))
    assert kept == [((0, 1), (0, 1), (1,)), ((0,), (0,), (0, 1)), ((0,), (0,), (1,))]


def test_no_larger_uniform_share_goes_than_asked_for_where_estimated_effects_fall() -> None:
    modules = (heads("a", 4), heads("b", 4))
    steps = list(enumerate((1.0, 3.0, 2.0)))
    chains = tuple(tuple(Removal(m.name, (unit,), effect) for unit, effect in steps) for m in modules)
    scores = Scores("compensated", {}, {m.name: torch.arange(4.0) for m in modules}, chains=chains)
    uniform = Constraints(allocation="uniform")
    found = select_units(scores, modules, table=table_of(modules, PRICE), ratio=0.5, constraints=uniform)
    assert [kept.units for kept in found.values()] == [(2, 3), (2, 3)]


@pytest.mark.parametrize("multiple", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_slopes_lose_little_more_than_the_best_choice(
    multiple: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    constraints, effects = Constraints(multiple_of={"neurons": multiple}), effects_of(LARGE, seed)
    ratio = random.Random(seed).uniform(0.3, 0.9)
    best = lost(chosen(effects, LARGE, ratio, constraints=constraints), effects)
    monkeypatch.setattr(joint, "MOST_OPTIONS", 0)
    found = chosen(effects, LARGE, ratio, constraints=constraints)
    assert cost(found, LARGE) <= ratio + 1e-9
    # At most the last edge is too much: here, a head or a few neurons.
    assert best - 1e-9 <= lost(found, effects) <= best * 1.12


def test_units_go_in_the_order_of_chains_whatever_their_scores(exact: bool) -> None:
    modules = (heads("a", 4, groups=2), block("m", 6))
    chains: tuple[Chain, ...] = (
        (Removal("a", (2, 3), 1.0), Removal("a", (0, 1), 90.0)),
        (Removal("m", (5, 0), 0.1), Removal("m", (2, 3), 0.3), Removal("m", (4, 1), 50.0)),
    )
    reverse = {"a": torch.arange(4.0), "m": torch.arange(6.0)}
    scores = Scores("compensated", {}, reverse, chains=chains)
    assert chains_of(scores, modules) == chains
    # Neurons to save: heads cost 12 of them a group. A removal of several neurons can be cut short, in its order.
    expected = {0.5: ((), (5,)), 1.5: ((), (0, 5)), 2.5: ((), (0, 2, 5)), 3.5: ((), (0, 2, 3, 5))}
    if not exact:  # the group of heads has the next slope, 1 / 12
        expected |= dict.fromkeys((2.5, 3.5), ((2, 3), (0, 5)))
    expected |= {5.5: ((2, 3), ()) if exact else ((2, 3), (0, 5)), 14.5: ((2, 3), (0, 2, 5))}
    for wanted, removed in expected.items():
        found = select_units(scores, modules, table=table_of(modules, PRICE), ratio=1 - wanted / 30)
        assert tuple(kept.removed for kept in found.values()) == removed


@pytest.mark.usefixtures("exact")
def test_heads_leave_in_the_order_of_their_scores_over_the_whole_model() -> None:
    effects = effects_of(LARGE, 3)
    generator = torch.Generator().manual_seed(9)
    hies = {m.name: torch.rand(m.units, generator=generator, dtype=torch.float64) for m in LARGE if m.kind != "mlp"}
    scores = Scores("hies", {"alpha": 0.9}, effects | hies, effects, ranked=("attention",))
    order = sorted((value, name, head) for name, values in hies.items() for head, value in enumerate(values.tolist()))
    removed = []
    for ratio in (0.9, 0.75, 0.6, 0.45, 0.3):
        found = select_units(scores, LARGE, table=table_of(LARGE, PRICE), ratio=ratio)
        gone = {(name, head) for name in hies for head in found[name].removed}
        left = dict.fromkeys(hies, 8)
        expected = []
        for _, name, head in order:
            if len(expected) < len(gone) and left[name] > 1:  # every module keeps a head
                expected.append((name, head))
                left[name] -= 1
        assert gone == set(expected)
        removed.append(len(gone))
        # Neurons go by their effects, in every block.
        for module in LARGE:
            if module.kind == "mlp" and (out := found[module.name].removed):
                effect = effects[module.name]
                assert effect[list(found[module.name].units)].min() >= effect[list(out)].max()
    assert removed == sorted(removed)
    assert len(set(removed)) > 2


def test_modules_that_are_not_scored_keep_everything() -> None:
    effects = effects_of(LARGE[:2], 0)
    found = chosen(effects, LARGE, 0.8)
    assert list(found) == [m.name for m in LARGE]
    assert [len(found[m.name].units) for m in LARGE[2:]] == [m.units for m in LARGE[2:]]
    assert found["a0"].removed
    assert found["m0"].removed


@pytest.mark.parametrize(
    ("modules", "constraints", "message"),
    [
        (LARGE, Constraints(), "heads and neurons that may go gives 0.080"),
        (
            LARGE,
            Constraints(min_heads=4, keep_layers=(0,), multiple_of={"neurons": 20}),
            "neurons that may go gives 0.667, the best there is; raise the target, or loosen min_heads, keep_layers or",
        ),
        (LARGE, Constraints(allocation="uniform", min_heads=4), r"that may go gives 0\.\d+, the best"),
        (LARGE[::2], Constraints(), "cutting all heads that may go"),
        (LARGE[1::2], Constraints(), "cutting all neurons that may go"),
    ],
)
def test_a_budget_that_cannot_be_met_says_the_least_there_is(
    modules: Sequence[Units], constraints: Constraints, message: str
) -> None:
    effects = effects_of(modules, 0)
    with pytest.raises(PlanError, match="the budget asks for FLOPs at most 0.01 of dense, .*" + message) as error:
        chosen(effects, modules, 0.01, constraints=constraints)
    # What is said to be in reach is.
    least = float(str(error.value).partition("gives ")[2].partition(",")[0]) + 5e-4
    assert cost(chosen(effects, modules, least, constraints=constraints), modules) <= least


def test_smaller_budgets_keep_a_part_of_what_larger_ones_keep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joint, "MOST_OPTIONS", 0)
    effects = effects_of(LARGE, 0)
    plans = [chosen(effects, LARGE, 0.95 - 0.05 * i) for i in range(17)]
    for more, less in itertools.pairwise(plans):
        assert all(set(less[m.name].units) <= set(more[m.name].units) for m in LARGE)


@pytest.mark.usefixtures("exact")
def test_equal_inputs_give_equal_selections_and_ties_go_to_the_later_unit() -> None:
    same = {m.name: torch.ones(m.units, dtype=torch.float64) * PRICE[m.kind] for m in LARGE}
    plans = [chosen(same, LARGE, 0.6) for _ in range(2)]
    assert plans[0] == plans[1]
    for kept in plans[0].values():
        assert kept.units == tuple(range(len(kept.units)))


@pytest.mark.slow
def test_many_neurons_are_no_trouble() -> None:
    modules = tuple(m for i in range(3) for m in (heads(f"a{i}", 32), block(f"m{i}", 11_008)))
    effects, price = effects_of(modules, 0), {"attention": 4 * 128.0, "mlp": 3.0}
    scores = scores_of(effects, ranked=("attention",))
    found = select_units(scores, modules, table=table_of(modules, price), ratio=0.5)
    total = sum(price[m.kind] * m.units for m in modules)
    kept = sum(price[m.kind] * len(found[m.name].units) for m in modules) / total
    assert 0.5 - price["attention"] / total < kept <= 0.5  # up to a head
    # Neurons all cost as much, so those of the least effect in the whole model go.
    out = torch.cat([effects[m.name][list(found[m.name].removed)] for m in modules if m.kind == "mlp"])
    stay = torch.cat([effects[m.name][list(found[m.name].units)] for m in modules if m.kind == "mlp"])
    assert out.max() <= stay.sort().values[32]  # up to the last edge
    assert len(out) > 10_000


def test_layers_that_are_not_there_are_refused() -> None:
    with pytest.raises(RecipeError, match="keep_layers must name layers"):
        chosen(effects_of(LARGE, 0), LARGE, 0.5, constraints=Constraints(keep_layers=(3,)))


def test_kinds_are_compared_by_effects_and_lose_the_same_share_without() -> None:
    scores = Scores("wanda-sp", {}, effects_of(SMALL, 0))
    table = table_of(SMALL, PRICE)
    found = select_units(scores, SMALL, table=table, ratio=0.5, constraints=Constraints(allocation="uniform"))
    assert [len(kept.removed) for kept in found.values()] == [2, 1, 2, 2]
    with pytest.raises(RecipeError, match="compared by effects, but the scores have none of a0"):
        select_units(scores, SMALL, table=table, ratio=0.5)
