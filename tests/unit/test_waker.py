"""The waker: wakes are kept, folded and never block.  The inbox: nothing is lost, no wait lasts."""

from __future__ import annotations

import queue
import select
import signal
import socket
import threading
import time
from collections.abc import Iterator

import pytest
from helpers import wait_until

from kombu_pgnotify.waker import Inbox, Waker, wait_any, wait_ready


@pytest.fixture(params=["poll", "select"])
def waker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Waker]:
    if request.param == "select":
        monkeypatch.delattr(select, "poll")
    waker = Waker()
    yield waker
    waker.close()


def test_a_wake_before_the_wait_is_kept(waker: Waker) -> None:
    waker.wake()
    assert waker.wait(0) is True
    assert waker.wait(0) is False


def test_many_wakes_are_one(waker: Waker) -> None:
    for _ in range(1000):
        waker.wake()
    assert waker.wait(None) is True
    assert waker.wait(0) is False


def test_waking_never_blocks_and_is_still_seen(waker: Waker) -> None:
    for _ in range(1_000_000):
        waker.wake()
        if not wait_ready(waker._writer.fileno(), 0, writable=True):
            break
    waker.wake()
    assert waker.wait(0) is True


def test_another_thread_ends_a_wait(waker: Waker) -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(waker.wait(30)))
    thread.start()
    waker.wake()
    thread.join(10)
    assert found == [True]


def test_a_wait_lasts_as_long_as_it_was_asked_to(waker: Waker) -> None:
    started = time.monotonic()
    assert waker.wait(0.05) is False
    # It must not end early either: the caller would spin until the time is over.
    assert 0.05 <= time.monotonic() - started < 5


def test_a_time_that_has_passed_only_looks(waker: Waker) -> None:
    assert waker.wait(-5) is False
    wait_any([waker.fileno()], -5)


def test_draining_forgets_the_wakes_so_far(waker: Waker) -> None:
    waker.drain()
    waker.wake()
    waker.drain()
    assert waker.wait(0) is False


def test_a_closed_waker_can_be_woken_drained_and_waited_for(waker: Waker) -> None:
    waker.close()
    waker.wake()
    waker.drain()
    waker.close()
    assert waker.fileno() == -1
    started = time.monotonic()
    assert waker.wait(0.05) is False
    assert time.monotonic() - started >= 0.05, "who waits in a loop must not spin"


def test_its_file_descriptor_is_readable_once_woken(waker: Waker) -> None:
    assert not wait_ready(waker.fileno(), 0)
    waker.wake()
    assert wait_ready(waker.fileno(), 0)
    wait_any([waker.fileno()], 30)


def test_wait_any_ends_with_any(waker: Waker) -> None:
    other = Waker()
    thread = threading.Thread(target=wait_any, args=((waker.fileno(), other.fileno()), 30))
    thread.start()
    other.wake()
    thread.join(10)
    assert not thread.is_alive()
    other.close()


def test_waiting_to_write_ends_when_there_is_room(waker: Waker) -> None:
    left, right = socket.socketpair()
    with left, right:
        assert wait_ready(left.fileno(), 0, writable=True)
        assert not wait_ready(left.fileno(), 0)


def test_a_wake_from_a_signal_handler_or_a_destructor_takes_no_lock(waker: Waker) -> None:
    class Dying:
        def __del__(self) -> None:
            waker.wake()

    Dying()
    wait_until(lambda: waker.wait(0))


@pytest.fixture
def mail() -> Iterator[Inbox[int]]:
    inbox: Inbox[int] = Inbox()
    inbox.open()
    yield inbox
    inbox.close()


@pytest.mark.parametrize("timeout", [0, -1, 1e-9, 1e-6, 1e-4])
def test_a_get_ends_however_short_its_time_is(mail: Inbox[int], timeout: float) -> None:
    # queue.SimpleQueue waits for ever here within a few thousand times, up to Python 3.12.
    for number in range(3_000):
        mail.put(number)
        assert mail.get(timeout) == number
        with pytest.raises(queue.Empty):
            mail.get(timeout)


def test_what_comes_before_while_and_after_the_thread_is_there_is_kept() -> None:
    inbox: Inbox[int] = Inbox()
    inbox.put(1)
    inbox.open()
    inbox.put(2)
    assert [inbox.get(30), inbox.get(30)] == [1, 2]
    inbox.close()
    inbox.put(3)
    assert not inbox.empty()
    inbox.open()
    assert inbox.get(0) == 3
    assert inbox.empty()
    inbox.close()


def test_nothing_is_lost_between_threads_and_signal_handlers(mail: Inbox[int]) -> None:
    before = signal.signal(signal.SIGALRM, lambda *_: mail.put(-1))
    signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)
    threads = [
        threading.Thread(target=lambda: [mail.put(number) for number in range(1000)])
        for _ in range(4)
    ]
    try:
        for thread in threads:
            thread.start()
        got = []
        while len(got) < 4000:
            if (number := mail.get(30)) >= 0:
                got.append(number)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    for thread in threads:
        thread.join()
    assert sorted(got) == sorted(list(range(1000)) * 4)
