"""Parameters on their way to the server: text as PostgreSQL reads it, bytes as they are."""

from __future__ import annotations

import struct
from typing import Any

import psycopg
import pytest
from hypothesis import given, strategies as st

from kombu_pgnotify.wire import _encode, encode_all

texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))


def read_array(text: str) -> list[str | None]:
    """Read a one-dimensional array as PostgreSQL does (documentation, 8.15.6)."""
    assert text[0] + text[-1] == "{}"
    found: list[str | None] = []
    rest = text[1:-1]
    while rest:
        if rest[0] == '"':
            value, place = "", 1
            while rest[place] != '"':
                place += rest[place] == "\\"
                value += rest[place]
                place += 1
            found.append(value)
            rest = rest[place + 1 :]
        else:
            word, comma, after = rest.partition(",")
            found.append(None if word == "NULL" else word)
            rest = comma + after
        assert rest[:1] in ("", ",")
        rest = rest[1:]
    return found


@given(st.lists(texts | st.none()))
def test_a_list_of_texts_is_an_array(values: list[str | None]) -> None:
    (encoded,), formats = encode_all([values])
    assert formats == [0]
    assert encoded is not None
    assert read_array(encoded.decode()) == values


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([], "{}"), ([""], '{""}'), (["NULL", None, "null"], '{"NULL",NULL,"null"}'),
        (['a"b', "c\\d"], '{"a\\"b","c\\\\d"}'), (["{a,b}", " "], '{"{a,b}"," "}'),
        (["größe", "😀", "\n"], '{"größe","😀","\n"}'), ([1, -2, 2**62], f"{{1,-2,{2**62}}}"),
        ([1.5, None], "{1.5,NULL}"), ([True, False], "{True,False}"), (["\\"], '{"\\\\"}'),
    ],
)  # fmt: skip
def test_an_array_is_written_as_postgres_reads_it(values: list[Any], text: str) -> None:
    assert _encode(values) == text.encode()
    assert _encode(tuple(values)) == text.encode()


@given(st.lists(st.binary(), min_size=1))
def test_a_list_of_bytes_is_a_binary_array(values: list[bytes]) -> None:
    (encoded,), formats = encode_all([values])
    assert formats == [1]
    assert encoded is not None
    dimensions, has_null, oid, count, lower = struct.unpack_from("!5i", encoded)
    assert (dimensions, has_null, oid, count, lower) == (1, 0, 17, len(values), 1)
    found, place = [], 20
    for _ in range(count):
        (length,) = struct.unpack_from("!i", encoded, place)
        found.append(encoded[place + 4 : place + 4 + length])
        place += 4 + length
    assert found == values
    assert place == len(encoded)


def test_bytes_stay_bytes_and_nothing_stays_nothing() -> None:
    values = [b"\0\xff", None, b"", 5, 1.5, True, "text", ""]
    assert encode_all(values) == (
        [b"\0\xff", None, b"", b"5", b"1.5", b"True", b"text", b""],
        [1, 0, 1, 0, 0, 0, 0, 0],
    )


@pytest.mark.parametrize("value", ["\0", "a\0b", ["a", "b\0"], ["\0"], [None, "\0"]])
def test_text_with_a_nul_is_refused_and_not_cut(value: Any) -> None:
    with pytest.raises(psycopg.DataError, match="NUL"):
        _encode(value)


@pytest.mark.parametrize("value", ["\ud800", ["a", "\udfff"]])
def test_a_lone_surrogate_is_refused(value: Any) -> None:
    with pytest.raises(UnicodeEncodeError):
        _encode(value)
