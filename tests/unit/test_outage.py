"""Outage: when a consumer tries again, and when it gives up."""

from __future__ import annotations

import logging

import pytest

from kombu_pgnotify import outage
from kombu_pgnotify.outage import Outage


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, in its only element."""
    now = [100.0]
    monkeypatch.setattr(outage, "monotonic", lambda: now[0])
    monkeypatch.setattr(outage.random, "uniform", lambda low, high: 1.0)
    return now


def test_attempts_become_rarer_until_the_tolerance_is_used_up(clock: list[float]) -> None:
    out, waits = Outage(4.0), []
    while out.bears(OSError("away")):
        waits.append(round(out.wait(), 3))
        clock[0] += out.wait()
    assert waits == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0, 1.0]
    assert not out.lasts


def test_after_giving_up_it_bears_the_next_one_anew(clock: list[float]) -> None:
    out = Outage(1.0)
    assert out.bears(OSError("away"))
    clock[0] += 1.0
    assert not out.bears(OSError("away"))
    assert out.bears(OSError("away"))
    assert out.wait() == pytest.approx(0.05)


def test_no_tolerance_bears_nothing(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    out = Outage(0.0)
    assert not out.bears(OSError("away"))
    assert not out.lasts
    assert not caplog.messages


def test_a_hint_that_the_server_is_back_ends_the_wait(clock: list[float]) -> None:
    out = Outage(4.0)
    out.bears(OSError("away"))
    out.hurry()
    assert out.wait() == 0
    assert out.lasts


def test_it_says_when_it_begins_and_when_it_is_over(
    clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    out = Outage(10.0)
    out.over()
    out.bears(OSError("gone"))
    clock[0] += 1.5
    out.bears(OSError("still gone"))
    out.over()
    out.over()
    assert caplog.messages == [
        "consumption.interrupted tried again for 10 s: gone",
        "consumption.resumed after=1.5s",
    ]
