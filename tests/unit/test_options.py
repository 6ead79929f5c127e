"""Options: defaults, checks of every value, and what is passed over."""

from __future__ import annotations

import math
import pickle
from dataclasses import FrozenInstanceError
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st
from kombu import Connection

import kombu_pgnotify  # noqa: F401 - registers the scheme
from kombu_pgnotify import options, urls
from kombu_pgnotify.errors import ConfigurationError
from kombu_pgnotify.options import NAMES, Options
from kombu_pgnotify.transport import _options_of

#: What kombu's publishing puts into the same dictionary.
RETRY_POLICY = {
    "max_retries": 3, "interval_start": 0, "interval_step": 0.2, "interval_max": 1,
    "retry_errors": None, "errback": None, "callback": None,
}  # fmt: skip


def build(
    given_options: dict[str, Any] | None = None, url: str = "pgnotify://h", **kw: Any
) -> Options:
    return options.build(urls.parse(url, NAMES), given_options or {}, **kw)


def test_nothing_needs_to_be_set() -> None:
    found = build()
    assert found.schema == "pgnotify"
    assert found.visibility_timeout == 60
    assert found.notify is True
    assert found.max_attempts is None
    assert found.synchronous_commit == "on"


@pytest.mark.parametrize(
    ("given_options", "seconds"),
    [({}, 5), ({"notify": False}, 1), ({"polling_interval": 0.3}, 0.3),
     ({"polling_interval": 7, "notify": False}, 7), ({"polling_interval": None}, 5)],
)  # fmt: skip
def test_the_poll_is_a_backstop_where_there_are_announcements(
    given_options: dict[str, Any], seconds: float
) -> None:
    assert build(given_options).poll_every == seconds


def test_transport_options_win_over_the_url() -> None:
    found = build({"schema": "two"}, "pgnotify://h?schema=one&max_batch=7")
    assert (found.schema, found.max_batch) == ("two", 7)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("visibility_timeout", "3.5", 3.5),
        ("visibility_timeout", 3600, 3600.0),
        ("polling_interval", "0.1", 0.1),
        ("notify", "false", False),
        ("notify", "OFF", False),
        ("notify", 0, False),
        ("notify", "1", True),
        ("create_schema", "no", False),
        ("eta_in_broker", "Yes", True),
        ("prepared_statements", False, False),
        ("max_batch", "10", 10),
        ("max_batch", 10.0, 10),
        ("pool_size", 3, 3),
        ("max_attempts", "5", 5),
        ("max_attempts", None, None),
        ("synchronous_commit", False, "off"),
        ("synchronous_commit", True, "on"),
        ("synchronous_commit", "remote_apply", "remote_apply"),
        ("statement_timeout", 0, 0.0),
        ("connect_timeout", 0.5, 0.5),
        ("application_name", "me", "me"),
        ("application_name", None, None),
        ("schema", "Odd Name", "Odd Name"),
        ("schema", "ü" * 31, "ü" * 31),
        ("schema", None, "pgnotify"),
        ("notify", None, True),
    ],
)
def test_values_may_come_as_text_or_as_themselves(name: str, value: Any, expected: Any) -> None:
    found = getattr(build({name: value}), name)
    assert found == expected
    assert type(found) is type(expected)


WRONG_NUMBERS: list[Any] = [-1, "x", "", math.nan, math.inf, "nan", True, [], {}]
WRONG: dict[str, list[Any]] = {
    "schema": ["", 3, "a\0b", "x" * 64, "ü" * 32, "pg_mine", "a$kombu_pgnotify$b", b"bytes"],
    "create_schema": ["perhaps", "", 2, []],
    "queue_order_strategy": ["", "random", 1],
    "queue_name_prefix": [3, "a\0b", b"bytes"],
    "priority_order": ["", "asc", True],
    "expired_tasks": ["", "keep", False],
    "disable_prefetch": ["perhaps", 5],
    "visibility_timeout": [0, *WRONG_NUMBERS],
    "polling_interval": [0, *WRONG_NUMBERS],
    "notify": ["perhaps", 5],
    "live_queues": ["perhaps", 5],
    "listen_url": ["", 5, "pgnotify://me:secret@host/db"],
    "max_batch": [0, 1.5, "1.5", *WRONG_NUMBERS],
    "synchronous_commit": ["sometimes", 1, None, "", []],
    "statement_timeout": WRONG_NUMBERS,
    "connect_timeout": [0, *WRONG_NUMBERS],
    "outage_tolerance": WRONG_NUMBERS,
    "pool_size": [0, 2.5, *WRONG_NUMBERS],
    "application_name": ["", 3, "a\0b"],
    "max_attempts": [0, 1.5, *WRONG_NUMBERS],
    "dead_letter_retention": [0, *WRONG_NUMBERS],
    "health_check_interval": [0, *WRONG_NUMBERS],
    "eta_in_broker": ["maybe"],
    "prepared_statements": ["maybe"],
}


def test_each_option_has_its_wrong_values() -> None:
    assert set(WRONG) == set(NAMES)


@pytest.mark.parametrize(
    ("name", "value"),
    [(name, value) for name, values in WRONG.items() for value in values if value is not None],
)
def test_a_wrong_value_is_an_error_that_names_the_option(name: str, value: Any) -> None:
    with pytest.raises(ConfigurationError, match=f"option '{name}'"):
        build({name: value})


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(value=st.one_of(st.text(), st.integers(), st.floats(), st.binary(), st.lists(st.integers())))
def test_any_value_is_taken_or_a_configuration_error(name: str, value: Any) -> None:
    try:
        found = build({name: value})
    except ConfigurationError as error:
        message = str(error)
    else:
        assert isinstance(hash(found), int)
        return
    assert repr(name) in message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("visibilty_timeout", "visibility_timeout"),
        ("polling_intervall", "polling_interval"),
        ("Schema", "schema"),
        ("max_attempt", "max_attempts"),
        ("syncronous_commit", "synchronous_commit"),
    ],
)
def test_a_wrong_name_is_an_error_with_the_near_miss(name: str, meant: str) -> None:
    with pytest.raises(ConfigurationError) as error:
        build({name: 1})
    assert repr(name) in str(error.value)
    assert repr(meant) in str(error.value)


def test_a_name_like_none_of_ours_is_an_error_with_all_of_them() -> None:
    with pytest.raises(ConfigurationError) as error:
        build({"zzz": 1})
    assert all(name in str(error.value) for name in NAMES)


def test_neither_target_nor_password_source_is_an_option() -> None:
    for name in ("target", "password_source"):
        with pytest.raises(ConfigurationError):
            build({name: "x"})


def test_what_kombus_publishing_leaves_in_transport_options_is_passed_over() -> None:
    assert build(RETRY_POLICY) == build()
    connection = Connection("pgnotify://h", transport_options={"max_batch": 3})
    connection.transport_options.update(RETRY_POLICY)
    assert _options_of(connection) == build({"max_batch": 3}, connect_timeout=5)


def test_the_connect_timeout_of_kombu_is_used_unless_there_is_one_of_ours() -> None:
    assert build(connect_timeout=9).connect_timeout == 9
    assert build({"connect_timeout": 3}, connect_timeout=9).connect_timeout == 3
    assert build(url="pgnotify://h?connect_timeout=3", connect_timeout=9).connect_timeout == 3
    # None under gevent.
    assert build(connect_timeout=None).connect_timeout == build().connect_timeout


def test_options_are_frozen_equal_by_value_and_usable_as_a_key() -> None:
    one, two = build({"max_batch": 3}), build({"max_batch": "3"})
    assert one == two
    assert {one: 1}[two] == 1
    assert one != build({"max_batch": 4})
    with pytest.raises(FrozenInstanceError):
        one.max_batch = 4  # type: ignore[misc]
    assert pickle.loads(pickle.dumps(one)) == one


def test_a_source_of_passwords_tells_brokers_apart_and_is_not_shown() -> None:
    def source() -> str:
        return "Sesame-7291"

    found = build(password_source=source)
    assert found != build()
    assert found == build(password_source=source)
    assert "source" not in repr(found)
