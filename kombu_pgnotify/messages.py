"""Messages on their way in and out, and the channels on which they are announced."""

from __future__ import annotations

import functools
import hashlib
from typing import NamedTuple

#: Names of channels kept: to compute one takes as long as to encode a message.
REMEMBERED = 1000

#: What an announcement says (the NOTIFY payload): a row was published …
PUBLISHED = "published"

#: … or rows came back below what consumers have already passed: look from the start.
RELEASED = "released"


#: How many of those who wait are told of one message: one who looks at once, and another who does
#: so later, should the first one's process have died or been stopped.
TOLD = 2

#: All of them are told of several at once.
ALL = 0

#: Places that those who wait for one channel take, to be told by its number.  Who finds none is
#: told when nobody else is there.
SEATS = 16


def named_in(payload: str) -> list[int] | None:
    """Return the seats that an announcement names; None: it is meant for all.

    It is one of the statement announce_published.
    """
    what, _, seats = payload.partition(" ")
    if what != PUBLISHED or not seats:
        return None
    try:
        return [int(seat) for seat in seats.split(",")]
    except ValueError:
        return None


class Claimed(NamedTuple):
    """A message as ``MessageStore.claim`` returns it.

    `delivery` is the fence: with `task_id` it names this delivery and no other.
    `attempts` counts deliveries, this one included, without graceful releases.
    """

    task_id: int
    delivery: int
    attempts: int
    rank: int
    envelope: str
    payload: bytes
    #: It has outlived its time.
    expired: bool = False
    #: JSON: how it came here, if it was dead-lettered before.
    died: str | None = None
    #: When it was published, by the server's clock (epoch): with `task_id` it names the message
    #: even where a server that has lost its last instants gives the number to another one.
    published: float = 0.0


class Outgoing(NamedTuple):
    """A message to be published.

    Attributes:
        priority: 0 to 255, higher first unless the options say otherwise.
        available_at: ISO time with offset; the message is held until then.
        ttl: seconds after which nobody gets it any more.
        persistent: wait until it is on disk (AMQP's delivery mode 2).
    """

    envelope: str
    payload: bytes
    priority: int = 0
    available_at: str | None = None
    ttl: float | None = None
    persistent: bool = True


class Routed(NamedTuple):
    """Where an exchange has sent a message.

    Attributes:
        queues: those that got a row.
        live: how many notices were sent (each to any number of live queues).
        unbound: it is a durable direct exchange that nothing is bound to.
    """

    queues: list[str]
    live: int
    unbound: bool


class Fence(NamedTuple):
    """Names one delivery of one message."""

    task_id: int
    delivery: int


@functools.lru_cache(REMEMBERED)
def channel_of(schema: str, queue: str) -> str:
    """Return the NOTIFY channel of `queue`; the schema's own function computes the same."""
    digest = hashlib.sha224(f"{schema}.{queue}".encode("utf-8", "surrogatepass")).hexdigest()
    return "pgnotify_" + digest[:40]


def exchange_channel_of(schema: str, exchange: str) -> str:
    """Return the NOTIFY channel on which an exchange tells live queues."""
    digest = hashlib.sha224(f"{schema}.{exchange}".encode("utf-8", "surrogatepass")).hexdigest()
    return "pgnotify_x_" + digest[:40]


@functools.lru_cache(REMEMBERED)
def lock_of(channel: str) -> int:
    """Return the number of the advisory lock that says that somebody waits for `channel`.

    Those of its seats come next (:func:`seat_of`).
    """
    digest = hashlib.sha224(channel.encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True) & ~0xFF


def seat_of(channel: str, seat: int) -> int:
    """Return the number of the advisory lock of who has this seat."""
    return lock_of(channel) + 1 + seat


def any_channel_of(schema: str) -> str:
    """Return what a consumer of many queues waits for: something published to any of `schema`."""
    return channel_of(schema, "") + "_any"
