"""Options: a broker URL and ``transport_options`` become one frozen dataclass."""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from .errors import ConfigurationError
from .urls import Target, parse

#: Seconds between looks of an idle consumer that is told by NOTIFY (the backstop) …
POLL_WITH_NOTIFY = 5.0
#: … and of one that is not told.
POLL_WITHOUT_NOTIFY = 1.0

#: Values PostgreSQL takes for synchronous_commit.
_SYNCHRONOUS_COMMIT = ("on", "off", "local", "remote_write", "remote_apply")

#: Read by kombu itself from the same dictionary, some of it put there by kombu's own
#: publishing (retry policy); not ours to judge.
KOMBU_OPTIONS = frozenset(
    "body_encoding callback connect_retries_timeout deadletter_queue errback interval_max"
    " interval_start interval_step max_retries retry_errors".split()
)


@dataclass(frozen=True)
class Options:
    """Everything a process needs to know about one broker; hashable, password hidden.

    Each field but `target` is a key of ``transport_options`` and of the URL's query.

    Attributes:
        target: where the database is and how to get in (from the URL).
        schema: PostgreSQL schema that holds our tables; a namespace of its own.
        create_schema: create or upgrade the schema at the first connect; False leaves
            that to somebody with the rights (``python -m kombu_pgnotify upgrade``).
        visibility_timeout: seconds a lease lasts unless renewed; also the longest time
            until the messages of a crashed worker are delivered again.
        polling_interval: seconds between looks of an idle consumer; None: 5 with
            `notify` (then it is only a backstop), 1 without.
        notify: use LISTEN and NOTIFY; False polls only (for a pooler in transaction mode).
        live_queues: tell remote control and events to their consumers by NOTIFY, without rows.
            PostgreSQL lets whoever may connect to the database LISTEN and NOTIFY on any channel:
            False where some of those must not read or forge such messages.
        listen_url: where to LISTEN if not where the broker URL points, which may be a pooler in
            transaction mode; what it leaves out (database, user) is the broker URL's, and so is
            the password always.
        max_batch: messages claimed by one statement at the most.
        synchronous_commit: durability of a publish: on, off, local, remote_write or
            remote_apply.
        statement_timeout: seconds a statement may take, here and on the server; 0 sends the
            server no limit (a pooler may refuse start-up options) and keeps 30 here.
        connect_timeout: seconds a connection attempt to one host may take, at least 2.
        outage_tolerance: seconds a consumer bears a server that is away, trying again, before
            Celery is told, which then drops what it has prefetched and starts its consumer anew;
            0: Celery is told at once.
        pool_size: connections a process keeps open between statements; more are opened
            when threads need them and closed again afterwards.
        application_name: shown in ``pg_stat_activity``; None: kombu_pgnotify@host:pid.
        max_attempts: deliveries of a message before it becomes a dead letter; None: no limit.
        dead_letter_retention: seconds a dead letter is kept in the table of that name; None: until
            somebody deletes it.
        health_check_interval: seconds between checks that the LISTEN connection is alive.
        eta_in_broker: keep a Celery task with an ETA in the table until it is due; False
            hands it to a worker at once, which then keeps it, as other brokers do.
        queue_order_strategy: which queue comes first when several have messages: round_robin,
            sorted (by name) or priority (in the order in which they were declared to be
            consumed).
        queue_name_prefix: put before the name of every queue and exchange in the database: a
            namespace for each of several applications that share a schema.
        priority_order: amqp (255 first) or redis (0 first); the same in all processes.
        expired_tasks: deliver hands a Celery task whose ``expires`` has passed to a worker,
            which records it as revoked; drop lets it vanish, as RabbitMQ does.
        disable_prefetch: a Celery worker takes a task only when one of its processes is free
            (Celery's own ``worker_disable_prefetch`` is for Redis only).  Needs a
            ``worker_prefetch_multiplier`` other than 0.
        prepared_statements: prepare statements on the server; False for a pooler that
            cannot keep them.
    """

    target: Target
    schema: str = "pgnotify"
    create_schema: bool = True
    visibility_timeout: float = 60.0
    polling_interval: float | None = None
    notify: bool = True
    live_queues: bool = True
    listen_url: str | None = None
    max_batch: int = 100
    synchronous_commit: str = "on"
    statement_timeout: float = 10.0
    connect_timeout: float = 4.0
    outage_tolerance: float = 10.0
    pool_size: int = 1
    application_name: str | None = None
    max_attempts: int | None = None
    dead_letter_retention: float | None = None
    health_check_interval: float = 25.0
    eta_in_broker: bool = True
    queue_order_strategy: str = "round_robin"
    queue_name_prefix: str = ""
    priority_order: str = "amqp"
    expired_tasks: str = "deliver"
    disable_prefetch: bool = False
    prepared_statements: bool = True
    #: Called for the password at each connect, when it was given as a callable.
    password_source: Callable[[], Any] | None = field(default=None, repr=False)

    @property
    def listen_target(self) -> Target:
        """Where to LISTEN."""
        if self.listen_url is None:
            return self.target
        return parse(self.listen_url, ()).standing_for(self.target)

    @property
    def poll_every(self) -> float:
        """Seconds between looks of an idle consumer."""
        if self.polling_interval is not None:
            return self.polling_interval
        return POLL_WITH_NOTIFY if self.notify else POLL_WITHOUT_NOTIFY


#: Option names that may be set by a user.
NAMES = tuple(f.name for f in fields(Options) if f.name not in ("target", "password_source"))


def build(
    target: Target,
    given: Mapping[str, Any],
    *,
    connect_timeout: float | None = None,
    password_source: Callable[[], Any] | None = None,
) -> Options:
    """Check `given` (transport options) and the URL's own options against :class:`Options`.

    Arguments:
        target: the parsed URL; options in its query lose against `given`.
        given: ``transport_options``; keys that kombu itself reads are passed over.
        connect_timeout: seconds, from ``broker_connection_timeout``; used unless given.
        password_source: callable returning the password.

    Raises:
        ConfigurationError: an unknown option (naming the nearest known one) or a
            value of the wrong kind.
    """
    values: dict[str, Any] = dict(target.options)
    values.update((k, v) for k, v in given.items() if k not in KOMBU_OPTIONS)
    for name in values:
        if name not in NAMES:
            raise ConfigurationError(_unknown(name, NAMES, "transport option"))
    if connect_timeout and values.get("connect_timeout") is None:
        values["connect_timeout"] = connect_timeout
    checked = {k: _CHECKS[k](k, v) for k, v in values.items() if v is not None or k in _NULLABLE}
    return Options(target, password_source=password_source, **checked)


def _unknown(name: str, known: Iterable[str], kind: str) -> str:
    """Say that `name` is unknown and what was probably meant."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"known are: {', '.join(known)}"
    return f"unknown {kind} {name!r} for pgnotify: {hint}"


def _number(name: str, value: Any, lowest: float, *, above: bool = False) -> float:
    """Return `value` as a finite float not below `lowest` (or strictly `above` it)."""
    try:
        number = float(value) if not isinstance(value, bool) else math.nan
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number) or number < lowest or (above and number == lowest):
        bound = "more than" if above else "at least"
        raise ConfigurationError(
            f"option {name!r} must be a number, {bound} {lowest:g}, not {value!r}"
        )
    return number


def _seconds(name: str, value: Any) -> float:
    return _number(name, value, 0, above=True)


def _seconds_or_zero(name: str, value: Any) -> float:
    return _number(name, value, 0)


def _count(name: str, value: Any) -> int:
    number = _number(name, value, 1)
    if number != int(number):
        raise ConfigurationError(f"option {name!r} must be a whole number, not {value!r}")
    return int(number)


def _maybe(check: Callable[[str, Any], Any]) -> Callable[[str, Any], Any]:
    return lambda name, value: None if value is None else check(name, value)


def _flag(name: str, value: Any) -> bool:
    words = {"true": True, "1": True, "on": True, "yes": True}
    words |= {"false": False, "0": False, "off": False, "no": False}
    try:
        return words[str(value).lower()]
    except KeyError:
        raise ConfigurationError(f"option {name!r} must be true or false, not {value!r}") from None


def _text(name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value:
        raise ConfigurationError(f"option {name!r} must be a non-empty text, not {value!r}")
    return value


def _schema(name: str, value: Any) -> str:
    text = _text(name, value)
    if len(text.encode("utf-8", "replace")) > 63:
        raise ConfigurationError(
            f"option {name!r} is longer than the 63 bytes PostgreSQL keeps of a name: {value!r}"
        )
    if text.startswith("pg_"):
        raise ConfigurationError(
            f"option {name!r} may not start with 'pg_', which PostgreSQL reserves: {value!r}"
        )
    if "$kombu_pgnotify$" in text:
        raise ConfigurationError(f"option {name!r} may not contain '$kombu_pgnotify$': {value!r}")
    return text


def _durability(name: str, value: Any) -> str:
    word = {True: "on", False: "off"}.get(value, value) if isinstance(value, bool) else value
    return _one_of(*_SYNCHRONOUS_COMMIT)(name, word)


def _one_of(*words: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in words:
            raise ConfigurationError(
                f"option {name!r} must be one of {', '.join(words)}, not {value!r}"
            )
        return str(value)

    return check


def _listen_url(name: str, value: Any) -> str:
    target = parse(_text(name, value), ())
    if target.password is not None:
        raise ConfigurationError(
            f"option {name!r} may hold no password, since monitoring shows options: "
            "the broker URL's is used"
        )
    return str(value)


def _prefix(name: str, value: Any) -> str:
    return "" if value == "" else _text(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "schema": _schema,
    "create_schema": _flag,
    "visibility_timeout": _seconds,
    "polling_interval": _maybe(_seconds),
    "notify": _flag,
    "live_queues": _flag,
    "listen_url": _maybe(_listen_url),
    "max_batch": _count,
    "synchronous_commit": _durability,
    "statement_timeout": _seconds_or_zero,
    "connect_timeout": _seconds,
    "outage_tolerance": _seconds_or_zero,
    "pool_size": _count,
    "application_name": _maybe(_text),
    "max_attempts": _maybe(_count),
    "dead_letter_retention": _maybe(_seconds),
    "health_check_interval": _seconds,
    "eta_in_broker": _flag,
    "queue_order_strategy": _one_of("round_robin", "sorted", "priority"),
    "queue_name_prefix": _prefix,
    "priority_order": _one_of("amqp", "redis"),
    "expired_tasks": _one_of("deliver", "drop"),
    "disable_prefetch": _flag,
    "prepared_statements": _flag,
}

#: Options for which None is a value of its own.
_NULLABLE = frozenset(
    "application_name dead_letter_retention listen_url max_attempts polling_interval".split()
)
