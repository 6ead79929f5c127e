"""Topology: exchanges, queues and bindings, in tables that all processes share.

Knows SQL and nothing of kombu.  Routing itself happens in the statement that publishes
(the schema's function ``route``), so that a producer needs no copy of the bindings.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from .database import Database
from .errors import ConfigurationError
from .messages import channel_of
from .wire import Rows

logger = logging.getLogger(__name__)

#: What an announcement on a queue's channel says when it was bound to something more.
BOUND = "bound"

#: Seconds that a queue which goes with its last consumer is kept after that consumer was
#: last seen: it may be reconnecting.
AUTO_DELETE_AFTER = 60.0

#: The types of exchange there are (AMQP 0-9-1, without headers).
EXCHANGE_TYPES = ("direct", "topic", "fanout")

#: Milliseconds in AMQP's arguments, seconds here.
_MILLISECONDS = 1000.0

_LARGEST = 2**31


class Binding(NamedTuple):
    """What a queue hears of an exchange."""

    exchange: str
    routing_key: str
    exchange_type: str
    message_ttl: float | None
    #: The queue's, see :meth:`Topology.go_live`.
    version: int


class Touched(NamedTuple):
    """What a queue is like that can expire.

    Attributes:
        lasts: seconds it is kept when nobody uses it.
        bindings: how many it has.
        version: how often they were changed by those who are supposed to.
    """

    lasts: float
    bindings: int
    version: int


@dataclass(frozen=True)
class Queue:
    """A queue as declared.

    Attributes:
        arguments: as AMQP names them (``x-expires`` …), see :meth:`declared`.
        message_ttl, expires: seconds.
        name_prefix: what the names of its application begin with in the database.
    """

    name: str
    durable: bool = True
    exclusive: bool = False
    auto_delete: bool = False
    arguments: str = "{}"
    message_ttl: float | None = None
    expires: float | None = None
    max_priority: int | None = None
    max_length: int | None = None
    dead_letter_exchange: str | None = None
    dead_letter_routing_key: str | None = None
    name_prefix: str = ""

    @classmethod
    def declared(
        cls,
        name: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        durable: bool = True,
        exclusive: bool = False,
        auto_delete: bool = False,
    ) -> Queue:
        """Read a declaration's arguments.

        ``x-message-ttl`` and ``x-expires`` (milliseconds), ``x-max-priority`` (0 to 255),
        ``x-max-length`` (the head is dropped), ``x-dead-letter-exchange`` and
        ``x-dead-letter-routing-key``; others are kept and mean nothing.

        Raises:
            ConfigurationError: a value that cannot be.
        """
        given = dict(arguments or {})
        ttl = _number(name, given, "x-message-ttl", lowest=0)
        expires = _number(name, given, "x-expires", lowest=1)
        for ignored in ("x-max-length-bytes", "x-overflow"):
            if given.get(ignored) not in (None, "drop-head"):
                logger.warning("queue.argument_ignored queue=%r argument=%s", name, ignored)
        return cls(
            name,
            durable,
            exclusive,
            auto_delete,
            json.dumps(given, sort_keys=True, default=str),
            None if ttl is None else ttl / _MILLISECONDS,
            None if expires is None else expires / _MILLISECONDS,
            _number(name, given, "x-max-priority", lowest=0, highest=255),
            _number(name, given, "x-max-length", lowest=0),
            _text(name, given, "x-dead-letter-exchange"),
            _text(name, given, "x-dead-letter-routing-key"),
        )

    @property
    def passing(self) -> bool:
        """True if it goes when nobody uses it."""
        return self.auto_delete or self.expires is not None


class Topology:
    """Exchanges, queues and bindings of one broker.

    Every method may raise what :meth:`Database.session` raises.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._options = database.options
        self._statements = database.statements

    def declare_exchange(self, name: str, exchange_type: str, *, durable: bool) -> None:
        """Declare an exchange; a declaration that says otherwise than the last one wins.

        Winning and not refusing: a row left by somebody's old version must not keep the
        workers of today from starting.
        """
        replaced = self._run("declare_exchange", name, exchange_type, durable)
        if replaced:
            logger.warning(
                "exchange.redeclared exchange=%r type=%s was %s",
                name,
                exchange_type,
                replaced[0][0],
            )

    def exchange_type(self, name: str) -> str | None:
        """Return an exchange's type; None: there is no such exchange."""
        rows = self._run("exchange_type", name)
        return rows[0][0] if rows else None

    def exchanges(self) -> list[str]:
        """Return the names of all exchanges."""
        return [row[0] for row in self._run("exchanges")]

    def delete_exchange(self, name: str, *, if_unused: bool = False) -> None:
        """Delete an exchange and its bindings, but none of the queues."""
        lock = (self._statements["lock_exchange"], (name,))
        delete = (self._statements["delete_exchange"], (name, if_unused))
        for (queue,) in self._database.run(lock, delete)[1]:
            self.announce_bound(queue)

    def declare_queue(self, queue: Queue, declared_by: str) -> None:
        """Declare a queue; a declaration that says otherwise than the last one wins.

        Arguments:
            declared_by: names this declaration, for :meth:`abandon`.
        """
        columns = (
            queue.name,
            queue.durable,
            queue.exclusive,
            queue.auto_delete,
            queue.arguments,
            queue.message_ttl,
            queue.expires,
            queue.max_priority,
            queue.max_length,
            queue.dead_letter_exchange,
            queue.dead_letter_routing_key,
            queue.name_prefix,
        )
        for replaced, was_live in self._run("declare_queue", *columns, declared_by):
            if replaced != queue.arguments:
                logger.warning(
                    "queue.redeclared queue=%r arguments=%s were %s",
                    queue.name,
                    queue.arguments,
                    replaced,
                )
            if was_live:
                self.announce_bound(queue.name)

    def has_queue(self, name: str) -> bool:
        """True if a queue was declared, or holds messages all the same."""
        return bool(self._run("has_queue", name)[0][0])

    def delete_queue(self, name: str) -> None:
        """Forget a queue and its bindings, but none of its messages."""
        self._run("delete_queue", name)

    def bind(self, queue: str, exchange: str, routing_key: str) -> tuple[bool, bool]:
        """Bind a queue; return whether queue and exchange are there: else nothing happens."""
        row = self._run("bind", queue, exchange, routing_key, topic_pattern(routing_key))[0]
        if row[2]:
            self.announce_bound(queue)
        return bool(row[0]), bool(row[1])

    def announce_bound(self, queue: str) -> None:
        """Tell a queue's consumer that its bindings have changed."""
        if self._options.notify:
            channel = channel_of(self._options.schema, queue)
            self._database.run(hints=[(self._statements["announce"], (channel, BOUND))])

    def unbind(self, queue: str, exchange: str, routing_key: str) -> None:
        """Remove one binding."""
        if self._run("unbind", queue, exchange, routing_key)[0][0]:
            self.announce_bound(queue)

    def bindings(self) -> list[tuple[str, str, str]]:
        """Return ``(queue, exchange, routing key)`` of every binding."""
        return [(row[0], row[1], row[2]) for row in self._run("list_bindings")]

    def bindings_of(self, queue: str) -> list[Binding]:
        """Return by what a queue may hear directly; empty if it may not."""
        return [Binding(*row) for row in self._run("bindings_of", queue)]

    def go_live(self, queue: str, version: int) -> bool:
        """Have exchanges tell a queue directly; False if its bindings have changed meanwhile."""
        return bool(self._run("go_live", queue, version))

    def end_live(self, queue: str) -> None:
        """Have exchanges write rows for a queue again."""
        self._run("end_live", queue)

    def touch(self, queues: Sequence[str]) -> dict[str, Touched]:
        """Note that queues are in use; return those that can expire."""
        rows = self._run("touch", list(queues), AUTO_DELETE_AFTER)
        return {name: Touched(float(row[0]), row[1], row[2]) for name, *row in rows}

    def abandon(self, queue: str, declared_by: str) -> None:
        """Delete a queue that was one consumer's own, unless it was declared anew."""
        self._run("abandon", queue, declared_by)

    def claim_chore(self, every: float) -> bool:
        """True if it is our turn to sweep, which is nobody else's for `every` seconds."""
        return bool(self._run("claim_chore", every))

    def expired_queues(self, limit: int) -> list[str]:
        """Return queues that nobody has used for as long as they last."""
        return [row[0] for row in self._run("expired_queues", limit)]

    def sweep_queue(self, name: str) -> None:
        """Delete an expired, empty queue."""
        self._run("sweep_queue", name)

    def sweep_broadcasts(self, seconds: float) -> None:
        """Delete big messages for live queues after `seconds`."""
        self._run("sweep_broadcasts", seconds)

    def _run(self, name: str, *params: object) -> Rows:
        return self._database.run((self._statements[name], params))[0]


def topic_pattern(routing_key: str) -> str:
    """Return a binding's routing key as PostgreSQL's regular expression over ``.word.word…``.

    In AMQP 0-9-1 a key is words between dots, which may be empty; ``*`` stands for one
    word and ``#`` for any number of them, none included.
    """
    if routing_key == "":
        return "^$"
    wild = {"*": r"\.[^.]*", "#": r"(\.[^.]*)*"}
    words = (wild.get(word) or r"\." + _literal(word) for word in routing_key.split("."))
    return f"^{''.join(words)}$"


def _literal(word: str) -> str:
    """Escape what is neither letter nor digit (a backslash before those means something)."""
    return "".join(c if c.isalnum() or ord(c) > 127 else "\\" + c for c in word)


def _number(
    queue: str, given: Mapping[str, Any], name: str, *, lowest: int, highest: int = _LARGEST
) -> int | None:
    value = given.get(name)
    if value is None:
        return None
    whole = isinstance(value, int) or (isinstance(value, float) and value.is_integer())
    if isinstance(value, bool) or not whole:
        raise _unfit(queue, name, f"must be a whole number, not {value!r}")
    if not lowest <= value <= highest:
        raise _unfit(queue, name, f"must be {lowest} to {highest}, not {value!r}")
    return int(value)


def _text(queue: str, given: Mapping[str, Any], name: str) -> str | None:
    value = given.get(name)
    if value is not None and not isinstance(value, str):
        raise _unfit(queue, name, f"must be a text, not {value!r}")
    return value


def _unfit(queue: str, name: str, what: str) -> ConfigurationError:
    return ConfigurationError(f"argument {name!r} of queue {queue!r} {what}")
