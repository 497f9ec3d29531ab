"""Statistics of few requests, with confidence intervals.

Requests of one session are similar, so the bootstrap draws whole sessions (a cluster bootstrap;
Davison and Hinkley, Bootstrap Methods and their Application, 1997, 3.8), not single requests.
Ratios of two runs with the same sessions draw the same sessions for both.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

RESAMPLES = 2000
LEVEL = 0.95

# One sequence of values for each session.
Groups = Sequence[Sequence[float]]
Statistic = Callable[[Sequence[float]], float]


@dataclass(frozen=True, slots=True)
class Interval:
    """A statistic, and its confidence interval at `LEVEL`."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3g} ({self.low:.3g} to {self.high:.3g})"


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def quantile(values: Sequence[float], share: float) -> float:
    """Returns the quantile `share` (0 to 1) of at least one value, interpolated linearly between
    the two nearest values (type 7 of Hyndman and Fan).
    """
    ranked = sorted(values)
    index = share * (len(ranked) - 1)
    below = int(index)
    above = min(below + 1, len(ranked) - 1)
    return ranked[below] + (ranked[above] - ranked[below]) * (index - below)


def interval(groups: Groups, statistic: Statistic = mean, seed: int = 0) -> Interval:
    """Returns the statistic over all values, with its interval; needs at least one value."""
    return _bootstrap([groups], lambda drawn: statistic(drawn[0]), seed)


def ratio(above: Groups, below: Groups, seed: int = 0) -> Interval:
    """Returns the mean of `above` divided by the mean of `below`. Sessions are paired by index."""
    return _bootstrap([above, below], lambda drawn: mean(drawn[0]) / mean(drawn[1]), seed)


def regret(chosen: Groups, others: Sequence[Groups], seed: int = 0) -> Interval:
    """Returns by what fraction the mean of `chosen` exceeds the least mean of `others`: 0.1 means
    10 % more. Sessions are paired by index.
    """

    def statistic(drawn: Sequence[Sequence[float]]) -> float:
        return mean(drawn[0]) / min(mean(other) for other in drawn[1:]) - 1

    return _bootstrap([chosen, *others], statistic, seed)


def _bootstrap(
    runs: Sequence[Groups], statistic: Callable[[Sequence[Sequence[float]]], float], seed: int
) -> Interval:
    sizes = {len(groups) for groups in runs}
    if len(sizes) != 1:
        raise ValueError(
            f"runs of {sorted(sizes)} sessions cannot be paired: use runs with equal numbers of "
            "sessions"
        )
    (size,) = sizes
    rng = random.Random(seed)
    whole = [list(chain.from_iterable(groups)) for groups in runs]
    if not all(whole):
        raise ValueError("a run has no values, and a statistic needs at least one value")
    found = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(range(size), k=size)
        resample = [[v for index in drawn for v in groups[index]] for groups in runs]
        if all(resample):
            found.append(statistic(resample))
    tail = (1 - LEVEL) / 2
    return Interval(statistic(whole), quantile(found, tail), quantile(found, 1 - tail))
