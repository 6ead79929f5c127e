"""Messages survive the table; rows that are no messages are Unreadable and nothing else."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from kombu_pgnotify import envelopes
from kombu_pgnotify.envelopes import Unreadable, pack, unpack
from kombu_pgnotify.messages import Claimed

any_text = st.text(st.characters())  # lone surrogates and NUL too
plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | any_text
typed = (
    st.uuids()
    | st.datetimes(timezones=st.none() | st.just(datetime.timezone.utc))
    | st.binary(max_size=20)
)
values = st.recursive(
    plain | typed,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(any_text, inner, max_size=3),
)


def message(body: Any, headers: dict[str, Any] | None = None, **properties: Any) -> dict[str, Any]:
    encoding = envelopes.TEXT if isinstance(body, str) else envelopes.BINARY
    return {
        "body": body,
        "content-type": "application/json",
        "content-encoding": "utf-8",
        "headers": headers or {},
        "properties": {
            "body_encoding": encoding,
            "delivery_info": {"exchange": "e", "routing_key": "r"},
            "priority": 0,
            **properties,
        },
    }


def row_of(envelope: str, payload: bytes = b"", *, attempts: int = 1) -> Claimed:
    return Claimed(7, 3, attempts, 255, envelope, payload)


def round_trip(sent: dict[str, Any], **row: Any) -> dict[str, Any]:
    envelope, payload = pack(sent)
    assert envelope.isascii()
    assert "\0" not in envelope
    assert isinstance(payload, bytes)
    return unpack(row_of(envelope, payload, **row))


@settings(deadline=None)
@given(body=any_text)
def test_a_text_body_is_what_it_was(body: str) -> None:
    assert round_trip(message(body))["body"] == body


@settings(deadline=None)
@given(body=st.binary())
def test_a_body_of_bytes_is_what_it_was_and_is_not_packed(body: bytes) -> None:
    assert pack(message(body))[1] == body
    assert round_trip(message(body))["body"] == body


@pytest.mark.parametrize(
    "body", ["", "\0", "\ud800", "😀", "größe", b"", b"\0\xff", b"\xed\xa0\x80"]
)
def test_odd_bodies_are_what_they_were(body: str | bytes) -> None:
    found = round_trip(message(body))["body"]
    assert found == body
    assert type(found) is type(body)


def test_a_bytearray_and_a_memoryview_arrive_as_bytes() -> None:
    for body in (bytearray(b"\0\xff"), memoryview(b"\0\xff")):
        assert round_trip(message(body))["body"] == b"\0\xff"


@settings(deadline=None)
@given(headers=st.dictionaries(any_text, values, max_size=4))
def test_headers_are_what_they_were(headers: dict[str, Any]) -> None:
    # `__type__` is how kombu's JSON marks what it has translated.
    assert round_trip(message("x", headers))["headers"] == headers


def test_headers_with_kombus_types_are_what_they_were() -> None:
    headers = {
        "when": datetime.datetime(2030, 1, 2, 3, 4, 5, 6, tzinfo=datetime.timezone.utc),
        "day": datetime.date(2030, 1, 2),
        "id": uuid.uuid4(),
        "price": decimal.Decimal("1.10"),
        "raw": b"\0\xff",
        "nested": [{"id": uuid.uuid4()}],
    }
    found = round_trip(message("x", headers))["headers"]
    # kombu has no type for a date without a time.
    assert {**found, "day": headers["day"]} == headers


def test_text_that_looks_like_a_type_stays_text() -> None:
    headers = {"text": '{"__type__": "uuid", "__value__": "x"}'}
    assert round_trip(message("x", headers))["headers"] == headers


def test_the_message_itself_is_not_changed_by_packing() -> None:
    sent = message("x", {"a": 1})
    before = json.dumps(sent)
    pack(sent)
    assert json.dumps(sent) == before


def test_every_delivery_has_a_tag_of_its_own() -> None:
    found = round_trip(message("x", delivery_tag="old"))
    assert found["properties"]["delivery_tag"] == "7.3"


@pytest.mark.parametrize(("attempts", "redelivered"), [(1, None), (2, True), (9, True)])
def test_redelivered_is_said_from_the_second_attempt(
    attempts: int, redelivered: bool | None
) -> None:
    found = round_trip(message("x"), attempts=attempts)
    assert found["properties"]["delivery_info"].get("redelivered") is redelivered


def test_a_row_of_somebody_else_needs_only_properties() -> None:
    found = unpack(row_of('{"properties": {"body_encoding": "utf-8"}}', b"[1]"))
    assert found["body"] == "[1]"
    assert found["headers"] == {}
    assert found["properties"]["delivery_info"] == {"exchange": "", "routing_key": ""}


UNREADABLE = [
    "", "{", "null", "1", '"text"', "[]", "{}", '{"properties": null}', '{"properties": []}',
    '{"properties": 1}', '{"properties": {"delivery_info": null}}',
    '{"properties": {"delivery_info": []}}', '{"properties": {"delivery_info": "x"}}',
    '{"properties": {"body_encoding": "utf-8"}}', '{"properties": {}, "headers": 1}',
    '{"properties": {}, "x": {"__type__": "uuid", "__value__": "no uuid"}}',
    '{"properties": {}, "x": {"__type__": "datetime", "__value__": "no date"}}',
    '{"properties": {}, "x": {"__type__": "unknown", "__value__": 1}}',
    '{"properties": {}, "x": {"__type__": "decimal", "__value__": "no number"}}',
    '{"properties": {}, "x": {"__type__": "bytes", "__value__": 5}}',
    '{"properties": {}, "x": {"__type__": "base64", "__value__": "!"}}',
    '{"properties": {}, "x": {"__type__": []}}',
    "[" * 100_000,
    '{"a": ' * 50_000,
    "9" * 5000,
]  # fmt: skip


@pytest.mark.parametrize("envelope", UNREADABLE, ids=lambda text: text[:60])
def test_what_is_no_message_is_unreadable_or_a_message(envelope: str) -> None:
    try:
        found = unpack(row_of(envelope, b"\xff\xfe"))
    except Unreadable:
        return
    assert isinstance(found["properties"], dict)
    assert isinstance(found["headers"], dict), "kombu's Message needs a dictionary"


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)
envelope_like = st.fixed_dictionaries(
    {},
    optional={
        "properties": st.fixed_dictionaries(
            {},
            optional={
                "delivery_info": json_values,
                "body_encoding": json_values,
                "__type__": st.sampled_from(["uuid", "datetime", "decimal", "bytes", "x"]),
                "__value__": json_values,
            },
        )
        | json_values,
        "headers": json_values,
        "body": json_values,
        "__type__": st.sampled_from(["uuid", "datetime", "decimal", "bytes", "x"]),
        "__value__": json_values,
    },
)


@settings(deadline=None)
@given(envelope=(envelope_like | json_values).map(json.dumps) | st.text(), payload=st.binary())
def test_any_row_is_a_message_or_unreadable(envelope: str, payload: bytes) -> None:
    try:
        found = unpack(row_of(envelope, payload, attempts=2))
    except Unreadable:
        return
    assert isinstance(found["headers"], dict)
    assert isinstance(found["properties"]["delivery_info"], dict)
    assert isinstance(found["body"], (str, bytes))
