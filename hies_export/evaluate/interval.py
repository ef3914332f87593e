"""Bound, from a sample of rows, the share of predictions that stay the dense model's, and the loss of a metric."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ..late import stats

# Confidence of an interval, and of a whole search. Intervals are two-sided, so a value lies below the lower end of one
# with a probability of 2.5 %.
CONFIDENCE = 0.95
# A search for the largest cut that keeps a promise stops after so many cuts that do not.
FAILURES = 3


def confidence_of_each(looks: int) -> float:
    """Return the confidence that each of several intervals on the same rows needs, so that all together have 95 %.

    A look is an interval that decides whether something is promised. Only looks at promises that are false can go
    wrong: a true promise that fails only makes the cut milder. A search that stops after `FAILURES` failing cuts has at
    most `FAILURES` such looks, however many cuts pass: if the true share falls with the size of the cut, the cuts that
    are tried before the first wrong decision are known beforehand, because true promises pass and false ones fail.

    Source: Bonferroni's inequality; Bates et al., J. ACM 68 (2021), for risks that only fall; Angelopoulos et al.,
    "Learn then test", arXiv 2110.01052, for tests in a fixed order.
    """
    return 1 - (1 - CONFIDENCE) / max(1, looks)


def lower_share(
    same: torch.Tensor, samples: torch.Tensor | None = None, confidence: float = CONFIDENCE, *, scale: float = 1.0
) -> float:
    """Return the lower end of the Clopper-Pearson interval of a share.

    Tokens of one text are not independent. If samples have several predictions, the interval is that of as many
    independent predictions as have the same variance, or of fewer if there are few samples.

    Args:
        same: (predictions,) bool.
        samples: (predictions,) int64, the sample that each prediction belongs to; None if each has its own.
        confidence: Confidence of the two-sided interval.
        scale: The interval is that of `scale` times as many predictions.

    Source: Clopper and Pearson, Biometrika 26 (1934); Korn and Graubard, Survey Methodology 24 (1998), for clusters.
    """
    count = scale * (len(same) if samples is None else _effective_size(same.double(), samples, confidence))
    agreeing = same.double().mean().item() * count
    if agreeing <= 0:
        return 0.0
    return float(stats.beta.ppf((1 - confidence) / 2, agreeing, count - agreeing + 1))


def share_ends(
    same: torch.Tensor, samples: torch.Tensor | None = None, confidence: float = CONFIDENCE, *, scale: float = 1.0
) -> tuple[float, float]:
    """Return both ends of `lower_share`'s interval; the upper end is 1 - the lower end of the share that differs."""
    low = lower_share(same, samples, confidence, scale=scale)
    return low, 1 - lower_share(~same, samples, confidence, scale=scale)


def ratio_ends(
    slim: torch.Tensor, dense: torch.Tensor, confidence: float = CONFIDENCE, *, scale: float = 1.0
) -> tuple[float, float]:
    """Return both ends of an interval of mean(slim) / mean(dense), over paired queries.

    It is Fieller's interval, with Student's t, over the queries and an invented one, which stands for losses too rare
    to occur in the sample (as in the rule of three): its `dense` value is the mean over the others, and its `slim`
    value is 0 for the lower end, or twice that mean for the upper end.

    Simulated: how often the lower end is above the true ratio, for 300 or 1,000 queries and a nominal rate of 2.5 %
    (0.41 %). With heavy-tailed losses: at most 2.3 % (0.35 %); without the invented query 2.6 to 12 % (0.3 to 6 %); by
    the percentile bootstrap 3 to 10 % (0.4 to 3.5 %). If few queries lose all and the others nothing: 5 % (0 %);
    without the invented query 20 % or more (5 % or more).

    `slim` and `dense` are (queries,) values of at least 0; `confidence` and `scale` are as in `lower_share`.

    Source: Fieller, J. R. Stat. Soc. B 16 (1954).
    """
    slim, dense = slim.double(), dense.double()
    return _fieller_end(slim, dense, confidence, scale, -1), _fieller_end(slim, dense, confidence, scale, 1)


def _fieller_end(slim: torch.Tensor, dense: torch.Tensor, confidence: float, scale: float, sign: int) -> float:
    """Return the lower end of `ratio_ends`, 0 if unbounded, for `sign` -1; the upper, infinite if unbounded, for 1."""
    typical = dense.mean()
    # (2, queries + 1): the values of both models, those of the invented query last.
    values = torch.stack([torch.cat([slim, typical + sign * typical[None]]), torch.cat([dense, typical[None]])])
    weights = torch.full_like(values[0], scale)
    weights[-1] = 1.0
    size = weights.sum()
    means = (values * weights).sum(1) / size
    deviations = values - means[:, None]
    covariance = (deviations * weights) @ deviations.T / (size - 1) / size  # (2, 2), of the means
    t2 = float(stats.t.ppf((1 + confidence) / 2, size.item() - 1)) ** 2
    # The interval has the ratios r for which the mean of slim - r dense is within t standard errors of 0: those with
    # a r^2 - 2 b r + c <= 0. It is unbounded if the dense mean itself is within t standard errors of 0 (a <= 0).
    products = means[:, None] * means - t2 * covariance
    a, b, c = products[1, 1], products[0, 1], products[0, 0]
    if a <= 0:
        return 0.0 if sign < 0 else math.inf
    return max(0.0, ((b + sign * (b * b - a * c).clamp(min=0).sqrt()) / a).item())


def _effective_size(same: torch.Tensor, samples: torch.Tensor, confidence: float) -> float:
    """Return how many independent predictions `same`, (predictions,) float64, is worth; see `lower_share`."""
    share, groups, variance = same.mean().item(), len(samples.unique()), variance_of_mean(same, samples)
    if groups == 1 or variance == 0:
        return groups  # nothing shows that predictions of one sample are independent
    size = min(share * (1 - share) / variance, float(len(same)))  # so many have a mean of that variance
    # Student's t makes it smaller, as the variance is estimated from few samples (Korn and Graubard).
    tail = (1 + confidence) / 2
    return float(size * (stats.t.ppf(tail, len(same) - 1) / stats.t.ppf(tail, groups - 1)) ** 2)


def variance_of_mean(values: torch.Tensor, samples: torch.Tensor | None = None) -> float:
    """Return the variance of the mean of values, (predictions,), over draws of samples; infinite for a single sample.

    `samples` are as in `lower_share`. Values of one sample may depend on each other, so only their sum counts.
    """
    deviations = values.double() - values.double().mean()
    if samples is not None:
        distinct, index = samples.unique(return_inverse=True)
        deviations = deviations.new_zeros(len(distinct)).index_add(0, index, deviations)
    groups = len(deviations)
    return math.inf if groups == 1 else deviations.square().sum().item() * groups / (groups - 1) / len(values) ** 2


def upper_rate(count: int, rows: int, confidence: float = CONFIDENCE) -> float:
    """Return the one-sided Clopper-Pearson upper bound of the rate of events, given `count` events in `rows` rows."""
    return 1.0 if count >= rows else float(stats.beta.ppf(confidence, count + 1, rows - count))


def rate_rows_needed(rate: float, confidence: float = CONFIDENCE) -> int:
    """Return how many rows without an event bring the `upper_rate` down to `rate`, in (0, 1)."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - rate))


def rows_needed(share: float, confidence: float = CONFIDENCE) -> int:
    """Return how many rows, all predicted as by the dense model, bring `lower_share` up to `share`, in (0, 1)."""
    return math.ceil(math.log((1 - confidence) / 2) / math.log(share))


def queries_needed(share: float, confidence: float = CONFIDENCE) -> int:
    """Return how many queries, all ranked alike, bring the lower end of `ratio_ends` up to `share`, in (0, 1)."""
    tail = (1 + confidence) / 2
    # Of equal values, that end is (count - t) / (count + 1). The normal quantile is below t: the search starts too low.
    count = math.ceil((share + stats.norm.ppf(tail)) / (1 - share))
    while (count - stats.t.ppf(tail, count)) / (count + 1) < share:
        count += 1
    return count


# Least rows for the loss of a metric. On fewer, the bootstrap's interval is far too narrow: that of accuracy missed the
# true loss in 18 % of simulated draws of 50 rows, 6 % of 100, 3 % of 200, 1.5 % of 400, where 0.8 % is meant.
LEAST_FOR_LOSS = 200


@dataclass(frozen=True)
class Looks:
    """How often false promises may be tested on the held-out rows; the more often, the more rows it takes.

    A budget of `keep` is searched for once. `deploy` searches in several `forms`, and may try several `cascades`
    in one of them. It also looks at the dense model in `bits` forms in fewer bits than float32, and at the slim model
    only where the dense one kept the promise. So each of these forms has one false promise at most, unless by chance.
    """

    forms: int = 1
    cascades: int = 0
    bits: int = 0

    @property
    def confidence(self) -> float:
        """Confidence that each interval needs, so that all together have `CONFIDENCE`."""
        return confidence_of_each(FAILURES * self.forms + self.cascades + self.bits)

    def rows(self, share: float, metric: str | None) -> int:
        """Return how many rows confirm a share of predictions (of a metric: how many queries) if none loses any."""
        needed = rows_needed if metric is None else queries_needed
        return needed(share, self.confidence)
