"""Wire: values as PostgreSQL's protocol has them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import psycopg
from psycopg import pq

#: The rows of one statement.
Rows: TypeAlias = list[tuple[Any, ...]]

#: Formats of a parameter or a column.
TEXT, BINARY = 0, 1


def _int(raw: bytes) -> int:
    return int.from_bytes(raw, "big", signed=True)


#: Type OID of bytea (pg_type.dat).
_BYTEA = 17

#: Decoders of the binary format by type OID (pg_type.dat).
_DECODERS: dict[int, Callable[[bytes], Any]] = {
    16: lambda raw: raw != b"\0",  # boolean
    _BYTEA: bytes,
    20: _int,  # bigint
    21: _int,  # smallint
    23: _int,  # integer
    701: lambda raw: struct.unpack("!d", raw)[0],  # double precision
}


def decode_rows(result: pq.abc.PGresult) -> Rows:
    """Decode a result's rows."""
    columns = range(result.nfields)
    decoders = [_DECODERS.get(result.ftype(column), bytes.decode) for column in columns]
    get_value = result.get_value
    if result.nfields and not result.fformat(0):
        return [
            tuple(get_value(row, column) for column in columns) for row in range(result.ntuples)
        ]
    return [
        tuple(
            None if (raw := get_value(row, column)) is None else decoders[column](raw)
            for column in columns
        )
        for row in range(result.ntuples)
    ]


def encode_all(params: Sequence[Any]) -> tuple[list[bytes | None], list[int]]:
    """Encode parameters; return them and their formats."""
    formats = [BINARY if _is_binary(param) else TEXT for param in params]
    return [_encode(param) for param in params], formats


def _is_binary(value: Any) -> bool:
    return isinstance(value, bytes) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], bytes)
    )


def _encode(value: Any) -> bytes | None:
    """Encode a parameter: bytes as they are, anything else as PostgreSQL's text."""
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return _text(value).encode()
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], bytes):
            return _bytea_array(value)
        return ("{" + ",".join(map(_element, value)) + "}").encode()
    return str(value).encode()


def _text(value: str) -> str:
    if "\0" in value:
        # libpq would cut it there, silently.
        raise psycopg.DataError(f"text with a NUL cannot be kept: {value!r}")
    return value


def _element(value: Any) -> str:
    """Write an array's element (PostgreSQL documentation, 8.15.6)."""
    if isinstance(value, str):
        escaped = _text(value).replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    return "NULL" if value is None else str(value)


def _bytea_array(items: Sequence[bytes]) -> bytes:
    """Write a one-dimensional bytea[] in binary (array_recv in PostgreSQL's source)."""
    parts = [struct.pack("!5i", 1, 0, _BYTEA, len(items), 1)]
    for item in items:
        parts += (struct.pack("!i", len(item)), item)
    return b"".join(parts)
