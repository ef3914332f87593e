"""What a run takes: the estimate for numbers that are counted by hand, and what is said of it while a run goes on."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.models import bert, causal_lm, text_batch

from hies_export import prune
from hies_export.pipeline import price
from hies_export.pipeline.price import Priced, Size, in_words

SIZE = Size(
    **{"scored": 1000, "refitted": 4000, "judged": 500, "batch": 100, "hidden": 10, "widest": 40, "vocabulary": 0},
    **{"blocks": 2, "parameters": 8000, "weights": 40_000, "itemsize": 4, "left": 0.5},
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
    assert SIZE.work == {"score": 3000, "rank": 11_000 + 6000, "refit": 10_000, "judge": 1000}


def test_what_was_found_before_is_not_paid_again() -> None:
    rest = replace(SIZE, ranked=1.0, done=0.5).work
    assert rest == {"score": 3000, "rank": 0, "refit": 5000, "judge": 1000}


def test_memory_grows_with_what_is_held() -> None:
    def most(**changed: Any) -> float:
        return replace(SIZE, **changed).memory

    assert most(scored=10**6) - most() > 2 * 10 * 2 * 4 * (10**6 - 1000)  # hidden states and their gradients
    assert most(refitted=10**7) > most()
    assert most(vocabulary=10**6) - most() > 0.9 * 3 * 4 * 100 * 10**6


def test_it_is_said_once_and_corrected() -> None:
    now, said = 0.0, Said()
    priced = Priced(said, lambda: now)
    priced.expect(SIZE)
    priced.stage("score units: forward and backward")
    for number, _ in enumerate(priced.track(range(4), "score")):
        now += 100 if number == 0 else 0
    a_token = 100 / (1000 / 2)  # through both blocks
    takes = in_words(a_token * sum(SIZE.work.values()))
    assert said.stages[-1] == f"score units: forward and backward; all takes about {takes} and 1 GB of memory"
    now = 2 * a_token * SIZE.work["score"]  # twice as slow as the first block
    priced.stage("rank units by greedy removal")
    left = in_words(2 * a_token * (17_000 + 10_000 + 1000))
    assert said.stages[-1] == f"rank units by greedy removal (about {left} left)"
    now += 4 * a_token * SIZE.work["rank"]
    priced.stage("cut, and compare with the masked model")
    assert said.stages[-1] == "cut, and compare with the masked model"
    priced.stage("refit the output projections")
    left = in_words((2 * 3000 + 4 * 17_000) / 20_000 * a_token * 11_000)  # the pace of both stages
    assert said.stages[-1] == f"refit the output projections (about {left} left)"


@pytest.mark.parametrize(("loop", "passes"), [("effects", 1000), ("moments", 6000)])
def test_without_statistics_it_is_said_by_the_first_block_that_is_ranked(loop: str, passes: int) -> None:
    now, said = 0.0, Said()
    priced = Priced(said, lambda: now)
    priced.expect(SIZE)
    priced.stage("rank units by greedy removal")
    for number, _ in enumerate(priced.track(range(4), loop)):
        now += 1000 if number == 0 else 0
    takes = in_words(1000 * 2 / passes * (17_000 + 10_000 + 1000))
    assert said.stages[-1].startswith(f"rank units by greedy removal; all takes about {takes} and ")


def test_minutes_and_hours() -> None:
    known = {20: "1 minute", 119: "2 minutes", 89 * 60: "89 minutes", 5400: "1.5 hours"}
    assert {seconds: in_words(seconds) for seconds in known} == known


@pytest.mark.parametrize("budget", [{"flops": 0.9}, {"heads": 0.5}])
def test_prune_says_what_it_takes(budget: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "WORTH_SAYING", 0.0)
    said, rows = Said(), [{"input_ids": torch.randint(4, 32, (4, 12))} for _ in range(4)]
    prune(causal_lm(), rows, budget=budget, criterion="compensated", progress=said)
    assert any("all takes about 1 minute and 1 GB of memory" in stage for stage in said.stages) == ("flops" in budget)


def test_an_encoder_is_not_priced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(price, "WORTH_SAYING", 0.0)
    said = Said()
    prune(bert(), [text_batch()] * 4, budget={"flops": 0.9}, progress=said)
    assert not any("all takes" in stage for stage in said.stages), said.stages
