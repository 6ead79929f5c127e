"""Envelopes: a kombu message as a row's two columns and back.

The envelope is ASCII JSON of everything but the body, so that NUL and lone surrogates
in headers survive any database encoding; the body is kept byte for byte.
"""

from __future__ import annotations

import json
from typing import Any

from kombu.exceptions import EncodeError
from kombu.utils import json as kombu_json

from .messages import Claimed

#: ``body_encoding`` of a body that is text, and of one that is bytes.
TEXT, BINARY = "utf-8", "binary"

#: What kombu's JSON writes where plain JSON has no type (dates, UUIDs, bytes …).
_TYPED = '"__type__"'

#: The properties that AMQP 0-9-1 has (basic class), and those that kombu puts beside them.
_PROPERTIES = frozenset(
    "content_type content_encoding application_headers delivery_mode priority correlation_id"
    " reply_to expiration message_id timestamp type user_id app_id cluster_id"
    " body_encoding delivery_info delivery_tag".split()
)

#: Text bodies may hold lone surrogates.
_SURROGATES = "surrogatepass"


class Unreadable(ValueError):
    """A row that is no message: somebody's INSERT went wrong."""


def pack(message: dict[str, Any]) -> tuple[str, bytes]:
    """Return a message's envelope and payload."""
    body = message["body"] or b""
    if not isinstance(body, (str, bytes, bytearray, memoryview)):
        # By the serializer "raw"; bytes(5) would be five zeros.
        raise EncodeError(f"a body is text or bytes, not {type(body).__name__}")
    envelope = {key: value for key, value in message.items() if key != "body"}
    payload = body.encode("utf-8", _SURROGATES) if isinstance(body, str) else bytes(body)
    try:
        return kombu_json.dumps(envelope), payload
    except (TypeError, ValueError):
        _drop_strangers(envelope["properties"])
        return kombu_json.dumps(envelope), payload


def _drop_strangers(properties: dict[str, Any]) -> None:
    """Drop properties that are neither AMQP's nor JSON, as py-amqp does with what it cannot say."""
    for name in set(properties) - _PROPERTIES:
        try:
            kombu_json.dumps(properties[name])
        except (TypeError, ValueError):
            del properties[name]


def unpack(row: Claimed, prefix: str = "") -> dict[str, Any]:
    """Return the message of a row, with this delivery's own tag.

    Arguments:
        prefix: what names in the database begin with, and kombu's do not.

    Raises:
        Unreadable: the envelope is no JSON object with headers and properties.
    """
    try:
        loads = kombu_json.loads if _TYPED in row.envelope else json.loads
        message = loads(row.envelope)
        properties = message["properties"]
        if not isinstance(message.setdefault("headers", {}), dict):
            raise TypeError("headers are no object")
        info = properties.setdefault("delivery_info", {})
        properties["delivery_tag"] = f"{row.task_id}.{row.delivery}"
        info.setdefault("exchange", "")
        info.setdefault("routing_key", "")
        if row.attempts > 1:
            info["redelivered"] = True
        if row.died is not None:
            _tell_deaths(message["headers"], info, row.died, prefix)
        message["body"] = _body(row.payload, properties.get("body_encoding"))
    except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as exc:
        raise Unreadable(f"{type(exc).__name__}: {exc}") from exc
    except RecursionError as exc:
        raise Unreadable(f"{type(exc).__name__}: {exc}") from exc
    return message  # type: ignore[no-any-return]


def _tell_deaths(headers: dict[str, Any], info: dict[str, Any], died: str, prefix: str) -> None:
    """Say where a message was dead-lettered before (RabbitMQ, Dead Letter Exchanges)."""
    story = json.loads(died)
    info["exchange"] = story["exchange"].removeprefix(prefix)
    info["routing_key"] = story["routing_key"]
    deaths = headers["x-death"] = story["deaths"]
    for death in deaths:
        for name in ("queue", "exchange"):
            death[name] = death[name].removeprefix(prefix)
    for name in ("queue", "reason", "exchange"):
        headers[f"x-first-death-{name}"] = deaths[-1][name]


def _body(payload: bytes, encoding: str | None) -> str | bytes:
    if encoding in (None, BINARY):
        return payload
    return payload.decode("utf-8", _SURROGATES)
