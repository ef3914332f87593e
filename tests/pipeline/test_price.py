"""What a run takes: the formula on numbers that are counted by hand, and what is said of it while a run goes on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import bert, causal_lm, text_batch

from hies_export import prune
from hies_export.pipeline import price
from hies_export.pipeline.price import Module, Priced, Size, in_words

SIZE = Size(
    **{"scored": 1000, "refitted": 4000, "judged": 0, "batch": 100, "length": 50, "hidden": 10, "vocabulary": 0},
    **{"parameters": 8000, "weights": 40_000, "itemsize": 4, "left": 0.5},
    blocks=((Module(10, 10, 0), Module(40, 10, 0.01)),) * 2,
)


class Said:
    """Keeps what is shown."""

    def __init__(self) -> None:
        self.stages: list[str] = []

    def stage(self, name: str) -> None:
        self.stages.append(name)

    def track(self, items: Sequence[Any], name: str) -> Iterable[Any]:
        return items


def test_work_by_hand() -> None:
    work = SIZE.work(double=1, passed=0)
    forward = 8000 + 2 * 50 * 10 * 2
    assert SIZE.forward == forward
    assert work["score"] == 3 * 1000 * forward
    products = 2 * 4000 * (10**2 + 40**2) / 2
    heads, neurons = 6 * 1000 * 10**2 + 4 / 3 * 10**3, 1000 * 40 * (40 + 50 * 0.8) + 4 / 3 * 40**3
    walks = (4000 + 3 * 1000 + 2 * 1000) * forward
    assert work["rank"] == pytest.approx(walks + products + 2 * (heads + neurons))
    sums = 2 * 4000 * (5 * (2.5 + 10) + 20 * (10 + 10))
    fits = 2 * 5 * sum(f**3 / 3 + 2 * f**2 * 10 for f in (5, 20))
    scaled = 1.5 * 1024 * forward  # as many predictions as the logits' scale is fitted on
    assert work["refit"] == pytest.approx(1.5 * 4000 * forward + sums + fits + scaled)


def test_what_was_found_before_is_not_paid_again() -> None:
    work, rest = SIZE.work(), replace(SIZE, ranked=1.0, done=1.0).work()
    assert rest["rank"] == 0
    assert rest["refit"] == 1.5 * (SIZE.refitted + 1024) * SIZE.forward
    assert rest["score"] == work["score"]


def test_memory_grows_with_what_is_held() -> None:
    def most(**changed: Any) -> float:
        return sum(replace(SIZE, **changed).memory().values())

    assert most(scored=10**6) - most() > 2 * 10 * 2 * 4 * (10**6 - 1000)  # hidden states and their gradients
    assert most(refitted=10**7) > most()
    assert most(vocabulary=10**6) - most() > 0.9 * 3 * 4 * 100 * 10**6
    half = {"scored": 10**6, "itemsize": 2}
    assert most(**half, widened=True) - most(**half) == 4 * 4000  # a copy of one of the two blocks


def test_it_is_said_once_and_corrected() -> None:
    now, said = 0.0, Said()
    priced = Priced(said, lambda: now)
    priced.expect(SIZE)
    priced.stage("score units: forward and backward")
    for number, _ in enumerate(priced.track(range(4), "score")):
        now += 100 if number == 0 else 0
    work = SIZE.work()
    takes = in_words(100 * sum(work.values()) / (1000 * SIZE.forward / 2))
    assert said.stages[-1].startswith(f"score units: forward and backward; all takes about {takes} and ")
    # Twice as slow as the first block.
    now = 2 * 100 * work["score"] / (1000 * SIZE.forward / 2)
    priced.stage("rank units by greedy removal")
    left = in_words(2 * 100 * (work["rank"] + work["refit"]) / (1000 * SIZE.forward / 2))
    assert said.stages[-1] == f"rank units by greedy removal (about {left} left)"
    priced.stage("cut, and compare with the masked model")
    assert said.stages[-1] == "cut, and compare with the masked model"


def test_without_statistics_it_is_said_by_the_first_block_that_is_ranked() -> None:
    work = SIZE.work()
    del work["score"]
    of_effects = SIZE.scored * SIZE.forward / 2
    of_moments = SIZE.refitted * (SIZE.forward / 2 + sum(m.inputs**2 for m in SIZE.blocks[0]) / 2)
    for loop, first in (("effects", of_effects), ("moments", of_moments)):
        now, said = 0.0, Said()
        priced = Priced(said, lambda: now)  # noqa: B023
        priced.expect(SIZE)
        priced.stage("rank units by greedy removal")
        for number, _ in enumerate(priced.track(range(4), loop)):
            now += 1000 if number == 0 else 0
        takes = in_words(1000 * sum(work.values()) / first)
        assert said.stages[-1].startswith(f"rank units by greedy removal; all takes about {takes} and ")


def test_minutes_and_hours() -> None:
    known = {20: "1 minute", 119: "2 minutes", 89 * 60: "89 minutes", 5400: "1.5 hours"}
    assert {seconds: in_words(seconds) for seconds in known} == known


@pytest.mark.parametrize("budget", [{"flops": 0.9}, {"heads": 0.5}])
def test_prune_says_what_it_takes(budget: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "WORTH_SAYING", 0.0)
    said, rows = Said(), [{"input_ids": torch.randint(4, 32, (4, 12))} for _ in range(4)]
    prune(causal_lm(), rows, budget=budget, criterion="compensated", progress=said)
    assert any("all takes about 1 minute and 0.8 GB of memory" in stage for stage in said.stages) == ("flops" in budget)


def test_an_encoder_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "WORTH_SAYING", 0.0)
    said = Said()
    prune(bert(), [text_batch()] * 4, budget={"flops": 0.9}, progress=said)
    assert not any("all takes" in stage for stage in said.stages), said.stages
