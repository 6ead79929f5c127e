"""The brokers that are measured: our PostgreSQL and Redis, started here, and a RabbitMQ if any."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
from kombu.connection import Connection
from psycopg.sql import SQL, Identifier

from kombu_pgnotify.embedded import HOST, EmbeddedPostgres, free_port

from .context import QUEUE

#: Where a RabbitMQ answers that was installed and left as it is.
RABBITMQ = "amqp://guest:guest@127.0.0.1:5672//"

#: Seconds that a server may take to start, and one that is there to answer.
START_PATIENCE = 20.0
ANSWER_PATIENCE = 3.0

#: Options by which a broker is not to be used.
NONE = "none"

#: Settings that decide what a commit costs.
SETTINGS = ("fsync", "synchronous_commit", "wal_level", "shared_buffers", "full_page_writes")


@dataclass(frozen=True)
class Broker:
    """One that the measures can be run on."""

    name: str
    title: str
    url: str
    version: str
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Brokers:
    """Those that were found, those that were not and why, and the PostgreSQL's settings."""

    found: dict[str, Broker] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)

    def add(self, broker: Broker) -> None:
        """Measure on this one too."""
        self.found[broker.name] = broker


@contextmanager
def all_brokers(postgres: str | None, redis: str | None, rabbitmq: str) -> Iterator[Brokers]:
    """Start what is not running, and end it afterwards.

    Arguments:
        postgres, redis: URLs of running servers; None: one of our own.
        rabbitmq: URL of a running one.
    """
    brokers = Brokers()
    with ExitStack() as stack:
        stack.enter_context(_postgres(brokers, postgres))
        for name, title, begin in (
            ("redis", "Redis", _redis(brokers, redis)),
            ("rabbit", "RabbitMQ", _rabbitmq(brokers, rabbitmq)),
        ):
            try:
                stack.enter_context(begin)
            except Missing as exc:
                brokers.missing[name] = f"{title}: {exc}"
        yield brokers


class Missing(Exception):
    """A broker cannot be measured."""


@contextmanager
def _postgres(brokers: Brokers, url: str | None) -> Iterator[None]:
    """Have a database of our own, on a server of our own unless there is a URL."""
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(EmbeddedPostgres()).url()
        name = f"pgnotify_bench_{os.getpid()}"
        with psycopg.connect(url, autocommit=True) as link:
            link.execute(SQL("CREATE DATABASE {}").format(Identifier(name)))
            brokers.settings = {
                setting: str(psycopg.ClientCursor(link).execute(f"SHOW {setting}").fetchone()[0])  # type: ignore[index]
                for setting in SETTINGS
            }
            version = link.info.parameter_status("server_version") or ""
        ours = _with_database(url, name)
        brokers.add(Broker("ours", "kombu_pgnotify", ours, version.split()[0]))
        try:
            yield
        finally:
            with psycopg.connect(url, autocommit=True) as link:
                link.execute(SQL("DROP DATABASE {} WITH (FORCE)").format(Identifier(name)))


def remove_leased(broker: Broker) -> int:
    """Remove what is left of an earlier measure, which purging spares if it is leased."""
    if broker.name != "ours":
        return 0
    with psycopg.connect("postgresql" + broker.url.removeprefix("pgnotify")) as link:
        (known,) = link.execute("SELECT to_regclass('pgnotify.tasks')").fetchone() or (None,)
        return link.execute("DELETE FROM pgnotify.tasks").rowcount if known else 0


def _with_database(url: str, name: str) -> str:
    """Return the broker's URL of that database."""
    place, _, query = url.partition("?")
    server = place.partition("://")[2].partition("/")[0]
    return f"pgnotify://{server}/{name}{'?' if query else ''}{query}"


@contextmanager
def _redis(brokers: Brokers, url: str | None) -> Iterator[None]:
    if url == NONE:
        raise Missing("not wanted")
    if importlib.util.find_spec("redis") is None:
        raise Missing("no Python package redis")
    with ExitStack() as stack:
        if url is None:
            url = stack.enter_context(_redis_of_our_own())
        import redis

        client = redis.Redis.from_url(url)
        try:
            version = str(client.info("server")["redis_version"])
        except redis.exceptions.ConnectionError as exc:
            raise Missing(str(exc)) from exc
        brokers.add(Broker("redis", "Redis", url, version))
        yield
        with Connection(url) as connection:
            connection.default_channel.queue_delete(QUEUE)


@contextmanager
def _redis_of_our_own() -> Iterator[str]:
    """A Redis that keeps everything in memory."""
    if shutil.which("redis-server") is None:
        raise Missing("no redis-server in PATH")
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="bench-redis-") as folder:
        command = ["redis-server", "--port", str(port), "--bind", HOST, "--dir", folder]
        # A session of its own: Ctrl-C is for us, and we stop it last.
        process = subprocess.Popen(
            [*command, "--save", "", "--appendonly", "no"],
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            _wait_for_redis(process, port)
            yield f"redis://{HOST}:{port}/0"
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait()


def _wait_for_redis(process: subprocess.Popen[bytes], port: int) -> None:
    import redis

    deadline = time.monotonic() + START_PATIENCE
    while True:
        try:
            redis.Redis(HOST, port).ping()
            return
        except redis.exceptions.ConnectionError as exc:
            if process.poll() is not None or time.monotonic() > deadline:
                raise Missing(f"redis-server did not start: {exc}") from exc
            time.sleep(0.05)


@contextmanager
def _rabbitmq(brokers: Brokers, url: str) -> Iterator[None]:
    if url == NONE:
        raise Missing("not wanted")
    try:
        with Connection(url, connect_timeout=ANSWER_PATIENCE) as connection:
            version = str(connection.connection.server_properties["version"])
    except Exception as exc:
        raise Missing(f"none answers: {exc}") from exc
    brokers.add(Broker("rabbit", "RabbitMQ", url, version))
    confirming = {"confirm_publish": True}
    brokers.add(Broker("rabbit_confirms", "RabbitMQ, confirms", url, version, confirming))
    yield
    with Connection(url) as connection:
        connection.default_channel.queue_delete(QUEUE)
        # Celery's: of the same name.
        connection.default_channel.exchange_delete(QUEUE)
