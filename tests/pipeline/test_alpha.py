"""The choice of alpha, and of a criterion, against judgements given by hand."""

from types import SimpleNamespace

import pytest
import torch
from support.reading import classifying, given

from hies_export import Kept, Scores, Selection
from hies_export.evaluate.judge import Judge, Judgement
from hies_export.pipeline.stages import Trial
from hies_export.pipeline.trials import Trials, choose_alpha, choose_by_agreement
from hies_export.tasks import Predictions, TextGeneration


class Given(Trials):
    """Judges a cut by how it weighs tokens and the number of heads it keeps, as tables say."""

    def __init__(self, *by_heads: dict[int, Judgement], metric: str = "accuracy", texts: torch.Tensor | None = None):
        self._by_heads = dict(zip((1.0, 0.3), by_heads, strict=False))
        self.judge = SimpleNamespace(metrics=(metric,), samples=texts)  # type: ignore[assignment]

    def judged(self, trial: Trial) -> tuple[Judgement, torch.Tensor]:
        found = self._by_heads[trial.token_weights][len(trial.selection["layer"].units)]
        return found, torch.arange(100) < 100 * found.stability


def scores_for(heads: int, alpha: float) -> Scores:
    return Scores("hies", {"heads": heads, "alpha": alpha}, {})


def selection_of(scores: Scores) -> Selection:
    return {"layer": Kept(tuple(range(scores.parameters["heads"])), 20)}


def candidate(heads: int, alpha: float) -> Trial:
    scores = scores_for(heads, alpha)
    return Trial(scores, selection_of(scores))


def chosen(judgements: dict[float, Judgement], *, metric: str = "accuracy") -> float:
    """Every alpha has a selection of its own: one head more than the one before."""
    heads = {alpha: i + 1 for i, alpha in enumerate(judgements)}
    trials = Given({heads[alpha]: judgement for alpha, judgement in judgements.items()}, metric=metric)
    trial, tried = choose_alpha([candidate(n, alpha) for alpha, n in heads.items()], trials)
    assert [one.alpha for one in tried] == list(judgements)
    assert [(one.quality, one.stability) for one in tried] == [(j.quality, j.stability) for j in judgements.values()]
    assert [one.alpha for one in tried if one.chosen] == [trial.scores.parameters["alpha"]]
    assert len(trial.selection["layer"].units) == trial.scores.parameters["heads"]
    return trial.scores.parameters["alpha"]


# Metric, quality, its standard error and stability of the alphas 0.1, 0.5 and 0.9, and the alpha that is chosen.
CASES: dict[str, tuple[str, list[tuple[float | None, float, float]], float]] = {
    "beyond one standard error, quality": ("accuracy", [(0.9, 0.01, 0.2), (0.8, 0.01, 0.9)], 0.1),
    "within it, stability": ("accuracy", [(0.9, 0.01, 0.2), (0.895, 0.5, 0.3), (0.88, 0.5, 0.9)], 0.5),
    "of ties, quality, then alpha": ("accuracy", [(0.90, 0.05, 0.5), (0.89, 0.05, 0.5), (0.90, 0.05, 0.5)], 0.9),
    "without labels, stability": ("accuracy", [(None, 0.0, 0.2), (None, 0.0, 0.9), (None, 0.0, 0.4)], 0.5),
    "the lowest perplexity": ("perplexity", [(9.0, 0.1, 0.2), (8.0, 0.1, 0.1), (12.0, 0.1, 0.9)], 0.5),
    "perplexity, stability": ("perplexity", [(8.0, 0.5, 0.2), (8.4, 0.1, 0.3), (8.6, 0.1, 0.9)], 0.5),
    "perplexity, ties": ("perplexity", [(8.0, 0.5, 0.5), (8.1, 0.5, 0.5)], 0.1),
}


@pytest.mark.parametrize("name", CASES)
def test_what_decides(name: str) -> None:
    metric, judged, alpha = CASES[name]
    judgements = {a: Judgement(*of) for a, of in zip((0.1, 0.5, 0.9), judged, strict=False)}
    assert chosen(judgements, metric=metric) == alpha


def test_what_clearly_agrees_more_is_chosen_and_else_the_first() -> None:
    given = [Trial(Scores(f"c{n}", {}, {}), selection_of(scores_for(n, 0.0))) for n in range(1, 5)]

    def best(*of: dict[int, tuple[int, float | None]]) -> tuple[int, float]:
        trials = Given(*map(judged, of), metric="perplexity")
        _, tried = choose_by_agreement(given, (0.3,)[: len(of) - 1], trials)
        assert len(tried) == 4 + len(of) - 1
        (found,) = (t for t in tried if t.chosen)
        return found.candidate, found.token_weights

    def judged(of: dict[int, tuple[int, float | None]]) -> dict[int, Judgement]:
        return {n: Judgement(quality, 0.5, count / 100) for n, (count, quality) in of.items()}

    # Of 100 samples, 3 more are within two standard errors of 1.7, and 5 more are beyond two of 2.2.
    assert best({1: (90, 9.0), 2: (93, 9.0), 3: (90, 1.0), 4: (20, 1.0)}) == (0, 1.0)
    assert best({1: (90, 9.0), 2: (93, 9.0), 3: (95, 9.0), 4: (20, 1.0)}) == (2, 1.0)
    # The metric may be worse by its standard error of 0.5, and not by more. Without labels there is none.
    assert best({1: (90, 9.0), 2: (98, 9.5), 3: (80, 9.0), 4: (80, 1.0)}) == (1, 1.0)
    assert best({1: (90, 9.0), 2: (98, 9.6), 3: (80, 9.0), 4: (80, 1.0)}) == (0, 1.0)
    assert best({1: (90, None), 2: (98, None), 3: (70, None), 4: (80, None)}) == (1, 1.0)
    # Only the best is judged with other weights of tokens, by the same rule.
    first = {1: (90, 8.0), 2: (80, 9.0), 3: (70, 9.0), 4: (80, 1.0)}
    assert best(first, {1: (97, 8.0)}) == (0, 0.3)
    assert best(first, {1: (92, 8.0)}) == (0, 1.0)
    assert best(first, {1: (85, 1.0)}) == (0, 1.0)


@pytest.mark.parametrize(("length", "best"), [(1, 1), (5, 0)])
def test_tokens_of_one_text_are_no_reasons_of_their_own(length: int, best: int) -> None:
    """Of 100 tokens, five more agree: clearly so if they are of five texts, and not if they are all of one."""
    candidates = [Trial(Scores(f"c{n}", {}, {}), selection_of(scores_for(n, 0.0))) for n in (1, 2)]
    table = {n: Judgement(9.0, 0.5, share) for n, share in ((1, 0.9), (2, 0.95))}
    trials = Given(table, metric="perplexity", texts=torch.arange(100) // length)
    _, tried = choose_by_agreement(candidates, (), trials)
    assert [t.candidate for t in tried if t.chosen] == [best]


@pytest.mark.parametrize(("answers", "texts"), [(False, [0, 0, 1]), (True, None)])
def test_held_out_rows_say_which_predictions_are_of_one_text(answers: bool, texts: list[int] | None) -> None:
    tokens, sample = torch.tensor([5, 6, 7]), torch.tensor([0, 0, 1])
    dense = Predictions("tokens", tokens, sample, joint=answers)
    found = Judge((), dense, ("perplexity",), TextGeneration(None)).samples  # type: ignore[arg-type]
    assert (found if found is None else found.tolist()) == texts
    assert Judge((), given(torch.zeros(3, 2)), ("accuracy",), classifying()).samples is None
