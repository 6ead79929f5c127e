"""A queue's declaration: what the arguments mean, and what they cannot be."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, strategies as st

from kombu_pgnotify.errors import ConfigurationError
from kombu_pgnotify.topology import Queue, topic_pattern


def test_a_queue_without_arguments_has_none() -> None:
    assert Queue.declared("queue") == Queue("queue")
    assert Queue.declared("queue", {}) == Queue.declared("queue", None)


def test_each_argument_means_what_it_means_in_amqp() -> None:
    arguments = {
        "x-message-ttl": 1500,
        "x-expires": 250,
        "x-max-priority": 10,
        "x-max-length": 0,
        "x-dead-letter-exchange": "",
        "x-dead-letter-routing-key": "größe",
    }
    queue = Queue.declared("queue", arguments, durable=False, exclusive=True, auto_delete=True)
    assert queue.message_ttl == 1.5
    assert queue.expires == 0.25
    assert queue.max_priority == 10
    assert queue.max_length == 0
    assert queue.dead_letter_exchange == "", "the default exchange, not none"
    assert queue.dead_letter_routing_key == "größe"
    assert (queue.durable, queue.exclusive, queue.auto_delete) == (False, True, True)
    assert json.loads(queue.arguments) == arguments


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("x-message-ttl", 0), ("x-message-ttl", 2**31), ("x-message-ttl", 5.0), ("x-expires", 1),
        ("x-max-priority", 0), ("x-max-priority", 255), ("x-max-length", 2**31),
        ("x-dead-letter-exchange", "x" * 300),
    ],
)  # fmt: skip
def test_a_value_at_the_edge_is_good(argument: str, value: Any) -> None:
    Queue.declared("queue", {argument: value})


@pytest.mark.parametrize(
    "argument",
    ["x-message-ttl", "x-expires", "x-max-priority", "x-max-length", "x-dead-letter-exchange",
     "x-dead-letter-routing-key"],
)  # fmt: skip
def test_an_argument_that_is_none_is_not_given(argument: str) -> None:
    assert Queue.declared("queue", {argument: None}) == Queue(
        "queue", arguments=json.dumps({argument: None})
    )


NO_NUMBERS = [-1, 1.5, True, False, "5", "", b"5", [], {}, 2**31 + 1]
WRONG = [
    *((name, value) for name in ("x-message-ttl", "x-expires") for value in NO_NUMBERS),
    *((name, value) for name in ("x-max-priority", "x-max-length") for value in NO_NUMBERS),
    ("x-expires", 0), ("x-max-priority", 256), ("x-max-priority", 2**40),
    *((f"x-dead-letter-{what}", value) for what in ("exchange", "routing-key")
      for value in (0, True, b"x", [], {})),
]  # fmt: skip


@pytest.mark.parametrize(("argument", "value"), WRONG)
def test_a_value_that_cannot_be_is_refused_by_name(argument: str, value: Any) -> None:
    with pytest.raises(ConfigurationError) as error:
        Queue.declared("my queue", {"x-expires": 1000, argument: value})
    text = str(error.value)
    assert repr(argument) in text
    assert "'my queue'" in text
    assert repr(value) in text


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_float_that_is_no_number_is_refused_by_name(value: float) -> None:
    for argument in ("x-message-ttl", "x-expires", "x-max-priority", "x-max-length"):
        with pytest.raises(ConfigurationError, match=argument):
            Queue.declared("queue", {argument: value})


@given(
    argument=st.sampled_from(["x-message-ttl", "x-expires", "x-max-priority", "x-max-length"]),
    value=st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(),
)
def test_a_number_is_read_or_refused(argument: str, value: Any) -> None:
    try:
        queue = Queue.declared("queue", {argument: value})
    except ConfigurationError:
        return
    numbers = [queue.message_ttl, queue.expires, queue.max_priority, queue.max_length]
    assert sum(number is not None for number in numbers) == (value is not None)
    assert all(0 <= number <= 2**31 for number in numbers if number is not None)


def test_other_arguments_are_kept_and_mean_nothing() -> None:
    queue = Queue.declared("queue", {"x-queue-type": "quorum", "x-odd": {1: object}})
    assert "quorum" in queue.arguments
    assert queue.expires is None


@pytest.mark.parametrize(
    ("given", "warned"),
    [
        ({"x-overflow": "reject-publish"}, True), ({"x-overflow": "drop-head"}, False),
        ({"x-max-length-bytes": 5}, True), ({"x-overflow": None}, False), ({"x-odd": 1}, False),
    ],
)  # fmt: skip
def test_a_limit_that_is_not_kept_is_warned_about(
    given: dict[str, Any], warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    Queue.declared("queue", given)
    assert ("queue.argument_ignored" in caplog.text) == warned


@pytest.mark.parametrize(
    ("flags", "passing"),
    [({}, False), ({"auto_delete": True}, True), ({"exclusive": True}, False)],
)
def test_a_queue_is_passing_if_it_goes_by_itself(flags: dict[str, bool], passing: bool) -> None:
    assert Queue.declared("queue", **flags).passing is passing
    assert Queue.declared("queue", {"x-expires": 1}, **flags).passing


@given(st.text())
def test_a_pattern_is_anchored_and_has_no_bare_special_character(key: str) -> None:
    pattern = topic_pattern(key)
    assert pattern[0] + pattern[-1] == "^$"
    plain = pattern[1:-1].replace(r"(\.[^.]*)*", "").replace(r"\.[^.]*", "")
    while plain:
        if plain[0] == "\\":
            assert not plain[1].isalnum()
            plain = plain[2:]
        else:
            assert plain[0].isalnum() or ord(plain[0]) > 127
            plain = plain[1:]
