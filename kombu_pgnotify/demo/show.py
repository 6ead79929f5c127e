"""What the demo shows: colours and a moving line on a terminal, plain lines elsewhere.

ASCII only, since the output may end up in a log of any encoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .board import Counts

#: Seconds between two lines about the table where they cannot replace each other.
_LINE_EVERY = 0.4

#: Characters for the tasks in the table.
_BAR = 40

Show: TypeAlias = Callable[[Counts], None]


class Screen:
    """Writes to stdout."""

    def __init__(self) -> None:
        self._console = Console(highlight=False, markup=False, emoji=False, soft_wrap=True)
        self._errors = Console(
            highlight=False, markup=False, emoji=False, soft_wrap=True, stderr=True
        )
        self._steps = 0

    def step(self, title: str) -> None:
        """Begin a step."""
        self._steps += 1
        self._console.print()
        self._console.print(f"{self._steps}. {title}", style="bold cyan")

    def line(self, text: str, style: str = "") -> None:
        """Say something about the step."""
        self._console.print(f"   {text}" if text else "", style=style)

    def error(self, text: str) -> None:
        """Say on stderr what went wrong."""
        self._errors.print(text, style="red")

    def busy(self, text: str) -> AbstractContextManager[object]:
        """Show on a terminal that something takes a moment."""
        return self._console.status(text, spinner="line")

    @contextmanager
    def table(self, total: int) -> Iterator[Show]:
        """Show how the tasks table fills and empties: call what this gives with its counts."""
        if self._console.is_terminal:
            with Live(console=self._console, auto_refresh=False) as live:
                yield lambda counts: live.update(_row(counts, total), refresh=True)
        else:
            lines = _Lines(self._console, total)
            yield lines.show
            lines.flush()


class _Lines:
    """Prints the counts now and then, and the last ones in any case."""

    def __init__(self, console: Console, total: int) -> None:
        self._console, self._total = console, total
        self._printed_at = 0.0
        self._left_out: Counts | None = None

    def show(self, counts: Counts) -> None:
        self._left_out = counts
        if time.monotonic() - self._printed_at >= _LINE_EVERY:
            self.flush()

    def flush(self) -> None:
        if self._left_out is not None:
            self._console.print(_row(self._left_out, self._total))
            self._printed_at, self._left_out = time.monotonic(), None


def _row(counts: Counts, total: int) -> Text:
    """Draw the tasks in the table; the bar's length is all that were sent."""
    leased = -(-counts.leased * _BAR // total)
    ready = -(-counts.ready * _BAR // total)
    row = Text("   [")
    row.append("=" * leased, "green").append("#" * ready, "yellow")
    row.append(" " * max(0, _BAR - leased - ready)).append("]")
    row.append(f"  ready {counts.ready:3}", "yellow").append(f"  leased {counts.leased}", "green")
    return row.append(f"  finished {counts.finished:3}")
