"""Notices: what a NOTIFY carries arrives as it was, and anything else is Garbage."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from kombu_pgnotify import notices
from kombu_pgnotify.notices import LONGEST, Garbage, Notice, carry, parse

#: What `envelopes.pack` makes: JSON in ASCII, so that a line is a line.
envelopes = st.dictionaries(st.text(max_size=5), st.text(max_size=20), max_size=3).map(json.dumps)
ascii_bodies = st.text(st.characters(max_codepoint=127)).map(str.encode)
keys = st.frozensets(st.text(st.characters(exclude_categories=["Cs"]), max_size=8), max_size=4)

HEADING = '{"keys": ["k"], "not": [], "ttl": null}'


def heading(keys: frozenset[str], excepted: frozenset[str], ttl: float | None) -> str:
    return json.dumps({"keys": sorted(keys), "not": sorted(excepted), "ttl": ttl})


@settings(deadline=None)
@given(
    envelope=envelopes,
    body=st.binary(max_size=300) | ascii_bodies,
    to=keys,
    excepted=keys,
    ttl=st.none() | st.floats(0, 1e12),
)
def test_a_message_arrives_as_it_was(
    envelope: str, body: bytes, to: frozenset[str], excepted: frozenset[str], ttl: float | None
) -> None:
    carried = carry(envelope, body)
    assert carried is not None
    assert "\0" not in carried, "PostgreSQL takes none"
    assert carried.isascii(), "what is counted here are the server's bytes"
    found = parse(f"{heading(to, excepted, ttl)}\n{carried}")
    assert found == Notice(to, excepted, ttl, (envelope, body), 0)


@pytest.mark.parametrize(
    "body", [b"", b"\0", b"a\0b", b"\n", b"a\nb\n", b"t", b"#1", "größe".encode(), b"\xff" * 9]
)
def test_odd_bodies_arrive_as_they_were(body: bytes) -> None:
    assert parse(f"{HEADING}\n{carry('{}', body)}").message == ("{}", body)


@settings(deadline=None)
@given(
    size=st.integers(LONGEST - 40, LONGEST + 40) | st.integers(5800, 6000),
    byte=st.sampled_from([b"x", b"\n", b"\0", b"\xff"]),
    envelope=st.sampled_from(["", "{}", '{"a": "' + "x" * 30 + '"}']),
)
@example(LONGEST - 2, b"x", "")
@example(LONGEST - 1, b"x", "")
def test_it_is_carried_if_it_fits_and_only_then(size: int, byte: bytes, envelope: str) -> None:
    body = byte * size
    carried = carry(envelope, body)
    asciis = byte in (b"x", b"\n")
    length = len(envelope) + 2 + (size if asciis else (size + 2) // 3 * 4)
    assert (carried is not None) == (length <= LONGEST)
    if carried is not None:
        assert len(carried.encode()) == length
        assert parse(f"{HEADING}\n{carried}").message == (envelope, body)


def test_a_big_body_costs_nothing_to_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices.base64, "b64encode", None)
    assert carry("{}", b"\xff" * 50_000_000) is None


def test_a_row_is_named_by_its_id() -> None:
    found = parse('{"keys": ["k"], "not": ["q"], "ttl": 1.5}\n#42')
    assert found == Notice(frozenset("k"), frozenset("q"), 1.5, None, 42)


def test_what_a_later_version_adds_to_the_heading_is_passed_over() -> None:
    assert parse('{"keys": [], "not": [], "ttl": null, "new": {}}\n{}\nt').message == ("{}", b"")


# -- garbage

json_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
headings = st.fixed_dictionaries(
    {},
    optional={"keys": json_values, "not": json_values, "ttl": json_values | st.just(10**400)},
).map(json.dumps)
rests = st.text(max_size=10) | st.text("#tb\n{}=0123456789-_ ", max_size=30)
anything = st.text() | st.builds("{}\n{}".format, headings | st.just(HEADING), rests)


@settings(deadline=None, max_examples=400)
@given(anything)
def test_nothing_but_garbage_is_raised(text: str) -> None:
    try:
        found = parse(text)
    except Garbage:
        return
    # What is no garbage must do no harm later.
    assert found.ttl is None or found.ttl >= 0
    assert found.message is not None or 0 < found.broadcast_id < 2**63
    assert found.keys.isdisjoint(["no such key"])


@pytest.mark.parametrize(
    "text",
    [
        "", "\n", "\n\n", HEADING, f"{HEADING}\n", f"{HEADING}\n{{}}", f"{HEADING}\n{{}}\n",
        f"{HEADING}\n{{}}\nx", f"{HEADING}\n{{}}\nb!", f"{HEADING}\n{{}}\nbä", f"{HEADING}\n#",
        f"{HEADING}\n#x", f"{HEADING}\n#" + "9" * 5000, f"{HEADING}\n{{}}\nt\ud800",
        "[" * 100_000, '{"keys": [], "not": []}\n{}\nt',
        '{"keys": [{}], "not": [], "ttl": null}\n{}\nt',
    ],
)  # fmt: skip
def test_what_is_none_of_ours_is_garbage(text: str) -> None:
    with pytest.raises(Garbage):
        parse(text)


@pytest.mark.parametrize("ttl", ["NaN", "-1", "-Infinity", "1" + "0" * 400])
def test_a_time_that_cannot_be_is_garbage(ttl: str) -> None:
    with pytest.raises(Garbage):
        parse('{"keys": [], "not": [], "ttl": ' + ttl + "}\n{}\nt")


@pytest.mark.parametrize("number", [0, -1, 2**63, 10**40])
def test_an_id_that_no_row_can_have_is_garbage(number: int) -> None:
    with pytest.raises(Garbage):
        parse(f"{HEADING}\n#{number}")
