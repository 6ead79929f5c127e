"""Notices: a message that travels as the payload of a NOTIFY.

Three lines: a heading (JSON: ``keys``, the binding keys it goes to; ``not``, the queues that
have got it as a row instead; ``ttl``, seconds; ``n``, which makes equal ones differ), then the
envelope, then ``t`` and the body if it is ASCII, else ``b`` and the body in base64.  A message
too big for a NOTIFY has ``#`` and the id of its row in place of the last two.
"""

from __future__ import annotations

import base64
import json
import math
from typing import NamedTuple

#: Bytes of message that a NOTIFY takes for sure, beside the heading (it takes less than 8000).
LONGEST = 7900

_TEXT, _BASE64, _ROW = "t", "b", "#"


class Garbage(ValueError):
    """A NOTIFY on our channel that is none of ours."""


class Notice(NamedTuple):
    """A message for live queues, as heard.

    Attributes:
        keys: the binding keys that it goes to.
        excepted: queues that have got it as a row.
        ttl: seconds it lasts; None: as its queue says.
        message: envelope and payload; None: it is in the table …
        broadcast_id: … under this id.
    """

    keys: frozenset[str]
    excepted: frozenset[str]
    ttl: float | None
    message: tuple[str, bytes] | None
    broadcast_id: int


def carry(envelope: str, payload: bytes) -> str | None:
    """Return a message as a notice without its heading; None: it is too big."""
    if len(envelope) + len(payload) > LONGEST:
        return None
    if payload.isascii() and b"\0" not in payload:
        text = f"{envelope}\n{_TEXT}{payload.decode('ascii')}"
    else:
        text = f"{envelope}\n{_BASE64}{base64.b64encode(payload).decode('ascii')}"
    return text if len(text) <= LONGEST else None


def parse(text: str) -> Notice:
    """Read a notice.

    Raises:
        Garbage: anybody may NOTIFY anything on any channel.
    """
    heading, _, rest = text.partition("\n")
    try:
        head = json.loads(heading)
        keys, excepted = frozenset(head["keys"]), frozenset(head["not"])
        ttl = None if head["ttl"] is None else float(head["ttl"])
        if ttl is not None and not 0 <= ttl < math.inf:
            raise ValueError("a time that cannot be")
        if rest.startswith(_ROW):
            broadcast_id = int(rest[1:])
            if not 0 < broadcast_id < 2**63:
                raise ValueError("an id that no row can have")
            return Notice(keys, excepted, ttl, None, broadcast_id)
        envelope, _, body = rest.partition("\n")
        if body[:1] == _TEXT:
            payload = body[1:].encode()
        elif body[:1] == _BASE64:
            payload = base64.b64decode(body[1:], validate=True)
        else:
            raise ValueError("no body")
    except (
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        ArithmeticError,
        RecursionError,
    ) as exc:
        raise Garbage(f"{type(exc).__name__}: {exc}") from exc
    return Notice(keys, excepted, ttl, (envelope, payload), 0)
