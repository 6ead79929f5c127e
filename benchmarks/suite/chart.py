"""The brokers side by side as bars."""

from __future__ import annotations

import statistics
import textwrap
from pathlib import Path

from .plan import BROKERS, Measure
from .report import figures_of, number
from .targets import Results

COLOURS = {"ours": "#336791", "redis": "#d9483b", "rabbit": "#f28c28", "rabbit_confirms": "#f7c893"}
LABELS = {
    "ours": "kombu_pgnotify",
    "redis": "Redis",
    "rabbit": "RabbitMQ",
    "rabbit_confirms": "RabbitMQ, confirms",
}

#: Inches at 100 dots an inch: 800 pixels wide.
WIDTH, DOTS = 8.0, 100
BAR, GAP, MARGINS = 0.17, 0.12, 1.1

#: Characters of the caption in a line.
CAPTION = 125


def draw(measures: list[Measure], results: Results, caption: str, path: Path) -> bool:
    """Draw the chart; False if there is nothing to compare."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    groups = [(measure, _medians(measure, results)) for measure in measures if measure.of_brokers]
    groups = [(measure, found) for measure, found in groups if found]
    if not groups:
        return False
    bars = sum(len(found) for _, found in groups)
    height = bars * BAR + len(groups) * GAP + MARGINS
    figure, axes = pyplot.subplots(figsize=(WIDTH, height), dpi=DOTS)
    ticks, place = [], 0.0
    for measure, found in groups:
        ticks.append(place + (len(found) - 1) * BAR / 2)
        longest = max(found.values()) or 1
        for side, value in found.items():
            _bar(axes, place, value / longest, f"{number(value)} {measure.unit}", side)
            place += BAR
        place += GAP
    axes.set_yticks(ticks, [_label(measure) for measure, _ in groups], fontsize=9)
    axes.set_ylim(place - GAP / 2, -GAP)
    axes.set_xlim(0, 1.17)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    sides = [side for side in BROKERS if any(side in found for _, found in groups)]
    patches = [Patch(color=COLOURS[side], label=LABELS[side]) for side in sides]
    figure.legend(handles=patches, loc="upper center", ncols=4, fontsize=9, frameon=False)
    text = "\n".join(textwrap.wrap(caption, CAPTION))
    figure.text(0.015, 0.01, text, fontsize=6.5, color="#555555", va="bottom")
    bottom = (0.15 + 0.12 * (text.count("\n") + 1)) / height
    figure.subplots_adjust(left=0.27, right=0.99, top=1 - 0.35 / height, bottom=bottom)
    figure.savefig(path)
    return True


def _bar(axes: object, place: float, length: float, text: str, side: str) -> None:
    axes.barh(place, length, BAR * 0.92, color=COLOURS[side])  # type: ignore[attr-defined]
    weight = "bold" if side == "ours" else "normal"
    axes.text(length + 0.008, place, text, va="center", fontsize=8, weight=weight)  # type: ignore[attr-defined]


def _medians(measure: Measure, results: Results) -> dict[str, float]:
    found = {side: figures_of(results, measure.name, side, measure.figure) for side in BROKERS}
    return {side: statistics.median(values) for side, values in found.items() if values}


def _label(measure: Measure) -> str:
    """Break the title into lines that fit beside the bars."""
    title = measure.title + (" (less is better)" if measure.less_is_better else "")
    return "\n".join(textwrap.wrap(title, 28))
