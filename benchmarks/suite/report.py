"""The results as Markdown: brokers side by side, all figures, and what was to be reached."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .plan import BROKERS, Measure
from .targets import TARGETS, NeverFalls, Results, Target

PREFACE = """\
Medians, with the smallest and the largest of all repeats. A ratio is taken between the sides of one
repeat, and the median of those is given."""

#: Columns' headings, and what a side is called in a sentence.
NAMES = {
    "ours": "ours",
    "redis": "Redis",
    "rabbit": "RabbitMQ",
    "rabbit_confirms": "RabbitMQ with confirms",
    "bare": "bare INSERT",
    "limit": "Celery's own cost and a bare INSERT",
    "silent": "without NOTIFY",
    "consumed": "with a consumer at work",
    "consumed_silent": "the same without NOTIFY",
    "held": "old snapshot held",
    "million": "many ready and future",
    "leased": "10,000 leased ahead",
}


def number(value: float) -> str:
    """Write a figure with about three digits."""
    if value >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(values: Sequence[float]) -> str:
    """Write the median, and the smallest and the largest of several."""
    if not values:
        return "–"
    middle = number(statistics.median(values))
    return middle if len(values) == 1 else f"{middle} ({number(min(values))}–{number(max(values))})"


def figures_of(results: Results, measure: str, side: str, figure: str) -> list[float]:
    """Return a figure of a side, of all repeats."""
    return [
        figures[figure]
        for (name, of_side, _), figures in sorted(results.items())
        if (name, of_side) == (measure, side) and figure in figures
    ]


def write(measures: list[Measure], results: Results, about: Iterable[str]) -> str:
    """Return the whole report."""
    parts = [
        "# Benchmarks",
        "\n".join(f"- {line}" for line in about),
        PREFACE,
        "## Brokers side by side",
        _table(
            ["measure", "ours", "Redis", "RabbitMQ", "with confirms", "ours / others"],
            _side_by_side(measures, results),
        ),
        "## Targets",
        _table(["measure", "what", "found", "target", "met"], _targets(measures, results)),
        "## All figures",
        _table(["measure", "side", "figure", "value"], _everything(measures, results)),
    ]
    if errors := list(_errors(results)):
        parts += ["## What failed", "\n".join(errors)]
    return "\n\n".join(parts) + "\n"


def _table(heading: list[str], rows: Iterable[list[str]]) -> str:
    lines = [heading, ["---"] * len(heading), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _side_by_side(measures: list[Measure], results: Results) -> Iterator[list[str]]:
    for measure in measures:
        if not measure.of_brokers:
            continue
        cells = [
            spread(figures_of(results, measure.name, side, measure.figure)) for side in BROKERS
        ]
        ratios = []
        for side in BROKERS[1:]:
            values = Target(measure.name, measure.figure, 0, against=side).values(results)
            if values:
                ratios.append(f"{NAMES[side]}: {spread(values)}")
        unit = f", {measure.unit}" + (", less is better" if measure.less_is_better else "")
        yield [measure.title + unit, *cells, "<br>".join(ratios)]


def _targets(measures: list[Measure], results: Results) -> Iterator[list[str]]:
    titles = {measure.name: measure.title for measure in measures}
    for target in TARGETS:
        if target.measure not in titles:
            continue
        values, met = target.values(results), target.met(results)
        verdict = {True: "yes", False: "**no**", None: "not measured"}[met]
        if met is not None and _crosses(target, values):
            verdict += ", within the spread"
        wanted = _wanted(target, results)
        yield [titles[target.measure], _what(target), spread(values), wanted, verdict]


def _crosses(target: Target | NeverFalls, values: list[float]) -> bool:
    """True if some of the repeats say yes and some no."""
    if isinstance(target, NeverFalls) or target.instead:
        return False
    return len({target.reached_by(value) for value in values}) > 1


def _what(target: Target | NeverFalls) -> str:
    if not target.against:
        return target.figure
    return f"{target.figure}: {NAMES.get(target.side, target.side)} / " + NAMES.get(
        target.against, target.against
    )


def _wanted(target: Target | NeverFalls, results: Results) -> str:
    if isinstance(target, NeverFalls):
        noise = target.noise(results)
        return f"≥ {number(1 - noise)} (1 less the noise of {noise:.0%})"
    text = f"{'≥' if target.at_least else '≤'} {number(target.wanted)}"
    for other in target.instead:
        found = spread(other.values(results))
        text += f", or {_wanted(other, results)} of {NAMES[other.against]} (found {found})"
    return text


def _everything(measures: list[Measure], results: Results) -> Iterator[list[str]]:
    for measure in measures:
        for run in measure.runs:
            names: dict[str, Any] = {}
            for (name, side, _), figures in results.items():
                if (name, side) == (measure.name, run.side):
                    names |= figures
            for figure in names:
                if figure != "error":
                    values = figures_of(results, measure.name, run.side, figure)
                    side = NAMES.get(run.side, run.side)
                    yield [measure.name, side, figure, spread(values)]


def _errors(results: Results) -> Iterator[str]:
    for (measure, side, repeat), figures in sorted(results.items()):
        if "error" in figures:
            words = " ".join(str(figures["error"]).split())[-300:].replace("|", "/")
            yield f"- {measure}, {side}, repeat {repeat + 1}: `{words}`"
