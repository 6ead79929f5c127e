"""What is measured, on which sides, with how much."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

#: Sides that are brokers; all others are PostgreSQL used in another way.
BROKERS = ("ours", "redis", "rabbit", "rabbit_confirms")

#: Pools by the name of the measure: pool, processes or threads, tasks with --quick too.
POOLS = {"solo": ("solo", 1), "threads8": ("threads", 8), "prefork2": ("prefork", 2)}

#: Workers on one queue.
WORKERS = (1, 2, 4, 8, 16)


class Run(NamedTuple):
    """One side of a measure: the function of this package that measures it."""

    side: str
    function: str
    arguments: dict[str, Any]

    @property
    def broker(self) -> str:
        """The broker that it runs on."""
        return self.side if self.side in BROKERS else "ours"


class Measure(NamedTuple):
    """Sides to be compared by one figure.

    Attributes:
        figure: the one of each side's figures that matters.
        at_most: repeats, for those that take minutes.
    """

    name: str
    title: str
    figure: str
    unit: str
    runs: tuple[Run, ...]
    less_is_better: bool = False
    at_most: int = 100

    @property
    def of_brokers(self) -> bool:
        """True if it compares brokers."""
        return any(run.side == "redis" for run in self.runs)


def measures(quick: bool) -> list[Measure]:
    """Return all measures; `quick`: with just enough to see that they work."""
    size = _quick if quick else _full
    return [
        *_publishing(size),
        *_tasks(size),
        *_resting(size),
        *_waking(size),
        *_tables(size),
        *_growth(size),
    ]


def chosen(quick: bool, only: Iterable[str]) -> list[Measure]:
    """Return those measures, or all.

    Raises:
        ValueError: one is not known.
    """
    known = {measure.name: measure for measure in measures(quick)}
    names = list(only)
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"no such measure: {', '.join(unknown)}; known are {', '.join(known)}")
    return [known[name] for name in names or known]


def _full(full: int, quick: int) -> int:
    return full


def _quick(full: int, quick: int) -> int:
    return quick


def _brokers(function: str, **arguments: Any) -> tuple[Run, ...]:
    return tuple(Run(broker, function, arguments) for broker in BROKERS)


def _publishing(size: Any) -> list[Measure]:
    messages, tasks = {"count": size(5000, 1000)}, {"count": size(3000, 600)}
    batches = {"batches": size(200, 40), "size": 100}
    return [
        Measure(
            "publish",
            "publish one by one",
            "rate",
            "/s",
            (
                *_brokers("sides.publish_one_by_one", **messages),
                Run("bare", "bare.insert_one_by_one", messages),
            ),
        ),
        Measure(
            "batch",
            "publish in batches of 100",
            "rate",
            "/s",
            (
                Run("ours", "bare.publish_in_batches", batches),
                Run("bare", "bare.insert_in_batches", batches),
            ),
        ),
        Measure(
            "apply_async",
            "apply_async()",
            "rate",
            "/s",
            (
                *_brokers("sides.send_tasks", **tasks),
                Run("limit", "bare.send_tasks_to_memory", tasks),
            ),
        ),
        Measure(
            "consume",
            "consume and acknowledge",
            "rate",
            "/s",
            _brokers("sides.consume", count=size(8000, 1000)),
        ),
    ]


def _tasks(size: Any) -> list[Measure]:
    found = []
    for multiplier in (4, 64):
        for name, (pool, concurrency) in POOLS.items():
            runs = _brokers(
                "sides.run_tasks",
                count=size(3000, 600),
                pool=pool,
                concurrency=concurrency,
                multiplier=multiplier,
            )
            title = f"Celery, {pool}{f' {concurrency}' if concurrency > 1 else ''}"
            suffix = "" if multiplier == 4 else f"_x{multiplier}"
            title += "" if multiplier == 4 else f", prefetch × {multiplier}"
            found.append(Measure(f"e2e_{name}{suffix}", title, "rate", "/s", runs))
    return found


def _resting(size: Any) -> list[Measure]:
    return [
        Measure(
            "wake",
            "wake-up of an idle worker, p50",
            "p50_ms",
            "ms",
            _brokers("sides.wake_up", count=size(120, 30)),
            less_is_better=True,
        ),
        Measure(
            "idle",
            "idle worker, CPU",
            "cpu_percent",
            "%",
            _brokers("sides.idle", seconds=size(20, 6)),
            less_is_better=True,
        ),
    ]


def _waking(size: Any) -> list[Measure]:
    crowd = {"publishers": 16, "seconds": size(8, 3)}
    by_kombu = "publishers.publish_by_kombu"
    return [
        Measure(
            "publishers",
            "16 publishers, flush of 2 ms",
            "rate",
            "/s",
            (
                Run("ours", by_kombu, {**crowd, "told": True, "halted": True}),
                Run("silent", by_kombu, {**crowd, "told": False, "halted": True}),
                Run("consumed", by_kombu, {**crowd, "told": True, "halted": False}),
                Run("consumed_silent", by_kombu, {**crowd, "told": False, "halted": False}),
                Run("bare", "publishers.insert_silently", crowd),
            ),
        ),
        Measure(
            "busy",
            "NOTIFYs while all consumers are busy",
            "notifications",
            "",
            (Run("ours", "waking.notify_while_busy", {"count": size(100, 40)}),),
            less_is_better=True,
        ),
        Measure(
            "empty_claims",
            "empty claims a message, 16 idle consumers",
            "empty_claims",
            "",
            (Run("ours", "waking.claim_in_vain", {"consumers": 16, "count": size(200, 50)}),),
            less_is_better=True,
        ),
    ]


def _tables(size: Any) -> list[Measure]:
    passing, many = size(200_000, 5_000), size(1_000_000, 20_000)
    claim = "tables.claim_ten"
    return [
        Measure(
            "snapshot",
            "10 published, claimed, acknowledged",
            "rate",
            "/s",
            (
                Run("ours", "tables.pass_through", {"count": passing, "held": False}),
                Run("held", "tables.pass_through", {"count": passing, "held": True}),
            ),
            at_most=3,
        ),
        Measure(
            "claim",
            "claim of 10, p50",
            "p50_ms",
            "ms",
            (
                Run("ours", claim, {}),
                Run("million", claim, {"ready": many, "future": many}),
                Run("leased", claim, {"leased": size(10_000, 10_000)}),
            ),
            less_is_better=True,
            at_most=3,
        ),
    ]


def _growth(size: Any) -> list[Measure]:
    tasks = size(8000, 1000)
    runs = [
        Run(f"{workers}", "growth.many_workers", {"workers": workers, "count": tasks})
        for workers in WORKERS
    ]
    counts = [size(20_000, 1_000), size(100_000, 3_000), size(200_000, 6_000)]
    return [
        Measure("workers", "solo workers, tasks of 1 ms", "rate", "/s", tuple(runs)),
        Measure(
            "memory",
            "memory of a worker, last wave / first",
            "growth",
            "",
            (Run("ours", "growth.memory_after", {"counts": counts}),),
            less_is_better=True,
            at_most=2,
        ),
    ]
