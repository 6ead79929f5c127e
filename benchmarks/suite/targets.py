"""What is to be reached, and whether it was."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias

from .plan import WORKERS

#: (measure, side, repeat) -> figures by name.
Results: TypeAlias = dict[tuple[str, str, int], dict[str, Any]]

#: How much slower more workers may seem to be where a single repeat tells of no noise.
NOISE_UNKNOWN = 0.05


class Target(NamedTuple):
    """One figure, or its ratio to another side's, and what it is to be.

    Attributes:
        against: the side to be compared with in the same repeat; "": the figure counts.
        instead: is as good if it is reached.
    """

    measure: str
    figure: str
    wanted: float
    at_least: bool = True
    side: str = "ours"
    against: str = ""
    instead: tuple[Any, ...] = ()

    def values(self, results: Results) -> list[float]:
        """Return what each repeat has found."""
        return [value for _, value in self._by_repeat(results)]

    def _by_repeat(self, results: Results) -> Iterator[tuple[int, float]]:
        for (measure, side, repeat), figures in sorted(results.items()):
            if (measure, side) != (self.measure, self.side) or self.figure not in figures:
                continue
            value = figures[self.figure]
            if self.against:
                other = results.get((measure, self.against, repeat), {}).get(self.figure)
                if not other:
                    continue
                value /= other
            yield repeat, value

    def met(self, results: Results) -> bool | None:
        """True if the median reaches it; None if nothing was found."""
        values = self.values(results)
        if values and self.reached_by(statistics.median(values)):
            return True
        others = [target.met(results) for target in self.instead]
        if True in others:
            return True
        return False if values else None

    def reached_by(self, value: float) -> bool:
        """True if `value` is good enough."""
        return value >= self.wanted if self.at_least else value <= self.wanted


class NeverFalls(NamedTuple):
    """More workers do as much as fewer, but for the noise that the repeats show."""

    measure: str = "workers"
    figure: str = "rate"
    side: str = "more"
    against: str = "fewer workers"
    at_least: bool = True

    def values(self, results: Results) -> list[float]:
        """Return the worst step of each repeat: the rate of more workers by that of fewer."""
        repeats = sorted({repeat for measure, _, repeat in results if measure == self.measure})
        found = []
        for repeat in repeats:
            rates = [self._rate(results, workers, repeat) for workers in WORKERS]
            if all(rates):
                found.append(min(more / fewer for fewer, more in pairwise(rates)))
        return found

    def _rate(self, results: Results, workers: int, repeat: int) -> float:
        figures = results.get((self.measure, str(workers), repeat), {})
        return float(figures.get(self.figure, 0.0))

    def noise(self, results: Results) -> float:
        """Return by how much the repeats of the same number of workers differ, typically."""
        spreads = []
        for workers in WORKERS:
            rates = [
                figures[self.figure]
                for (measure, side, _), figures in results.items()
                if (measure, side) == (self.measure, str(workers)) and self.figure in figures
            ]
            if len(rates) > 1:
                spreads.append((max(rates) - min(rates)) / statistics.median(rates))
        return statistics.median(spreads) if spreads else NOISE_UNKNOWN

    def met(self, results: Results) -> bool | None:
        """True if the median of the worst steps is within the noise."""
        values = self.values(results)
        return statistics.median(values) >= 1 - self.noise(results) if values else None


def _ratios(
    measure: str, figure: str = "rate", at_least: bool = True, **wanted: float
) -> list[Target]:
    return [
        Target(measure, figure, value, at_least, against=side) for side, value in wanted.items()
    ]


#: Throughput of Celery by the pool: against RabbitMQ, against Redis.
_POOLS = {"solo": (1.0, 3.0), "threads8": (1.3, 4.0), "prefork2": (1.0, 2.5)}

TARGETS: list[Target | NeverFalls] = [
    *_ratios("publish", rabbit_confirms=2.0, redis=1.0, bare=0.75),
    Target("batch", "rate", 15_000, instead=(Target("batch", "rate", 0.6, against="bare"),)),
    *_ratios("apply_async", limit=0.85),
    *_ratios("consume", rabbit=1.5, redis=10.0),
    *(
        target
        for suffix in ("", "_x64")
        for pool, (rabbit, redis) in _POOLS.items()
        for target in _ratios(f"e2e_{pool}{suffix}", rabbit=rabbit, redis=redis)
    ),
    *_ratios("wake", "p50_ms", False, redis=1.0, rabbit=1.2),
    Target("idle", "connections", 2, False),
    Target("idle", "cpu_percent", 0.2, False),
    Target("idle", "wakeups", 2, False),
    *_ratios("publishers", silent=0.85),
    Target("publishers", "rate", 0.85, side="consumed", against="consumed_silent"),
    Target("busy", "notifications", 0, False),
    Target("empty_claims", "empty_claims", 2, False),
    Target("snapshot", "rate", 0.75, side="held", against="ours"),
    Target("claim", "p50_ms", 1.5, False, side="million", against="ours"),
    Target("claim", "p50_ms", 1.5, False, side="leased", against="ours"),
    Target("claim", "analyzed_p50_ms", 1.5, False, side="million", against="ours"),
    Target("claim", "analyzed_p50_ms", 1.5, False, side="leased", against="ours"),
    NeverFalls(),
    Target("memory", "growth", 1.1, False),
]
