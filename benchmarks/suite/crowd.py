"""Several forked processes that do the same at the same time."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from types import TracebackType

#: Seconds until all have come so far: sixteen processes on two cores take their time.
PATIENCE = 60.0


class Crowd:
    """Processes while the `with` block lasts; each runs ``work(index, crowd)``.

    They are forked at once, before anybody has a connection or a thread, and wait for
    :meth:`begin`.  `work` calls :meth:`meet` when it is set up, as the parent does, and ends
    when :attr:`stopped` is set.
    """

    def __init__(
        self, size: int, work: Callable[[int, Crowd], None], places: int | None = None
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._begin, self._meeting = (context.Barrier(size + 1) for _ in range(2))
        self.stopped = context.Event()
        #: One place for each process, or so many, to count what it likes.
        self.counts = context.Array("q", places or size, lock=False)
        self._work = work
        self._processes = [
            context.Process(target=self._run, args=(index,), daemon=True) for index in range(size)
        ]

    def begin(self) -> None:
        """Have all set up."""
        self._begin.wait(PATIENCE)

    def meet(self) -> None:
        """Wait until all are set up."""
        self._meeting.wait(PATIENCE)

    def join(self) -> None:
        """Tell all to end, those too that have halted themselves, and wait for it."""
        self.stopped.set()
        for process in self._processes:
            if process.pid and process.is_alive():
                os.kill(process.pid, signal.SIGCONT)
        for process in self._processes:
            process.join(PATIENCE)

    def _run(self, index: int) -> None:
        self._begin.wait(PATIENCE)
        self._work(index, self)

    def __enter__(self) -> Crowd:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stopped.set()
        for process in self._processes:
            process.join(1.0 if kind else PATIENCE)
            if process.is_alive():
                process.kill()
                process.join()
