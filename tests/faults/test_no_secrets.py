"""Whatever is printed, by whomever, and whatever goes wrong: the password is not in it."""

from __future__ import annotations

import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote, quote_plus

import psutil
import pytest
from celery import Celery
from fix_postgres import Server
from fix_worker import REPOSITORY, CeleryWorker
from helpers import wait_until
from kombu import Connection

from kombu_pgnotify.embedded import EmbeddedPostgres, EmbeddedPostgresError
from kombu_pgnotify.errors import PgnotifyError

SECRET = "s3cr3t/p@ss:w?rd% +&"
OTHER = "n3w-s3cr3t"
TRACES = [SECRET, quote(SECRET, safe=""), quote_plus(SECRET), "s3cr3t"]
APP = "tests.celery.app"


def found_in(text: str) -> list[str]:
    return [line for line in text.splitlines() if any(trace in line for trace in TRACES)][:5]


@pytest.fixture(scope="module")
def walled() -> Iterator[Server]:
    """A server that asks the role `walled` for its password."""
    postgres = EmbeddedPostgres(fast=True, hba=["host all walled 127.0.0.1/32 scram-sha-256"])
    try:
        postgres.start()
    except EmbeddedPostgresError as error:
        pytest.skip(str(error))
    try:
        server = Server(postgres.url(), postgres)
        server.run_sql(f"CREATE ROLE walled LOGIN PASSWORD '{SECRET}'")
        yield server
    finally:
        postgres.stop()


@pytest.fixture
def database_name(walled: Server) -> Iterator[str]:
    name = walled.create_database()
    walled.run_sql(f"ALTER DATABASE {name} OWNER TO walled")
    yield name
    walled.drop_database(name)


@pytest.fixture
def database(walled: Server, database_name: str) -> str:
    return walled.url(database_name)


@pytest.fixture
def urls(walled: Server, database_name: str) -> dict[str, str]:
    """Broker URLs that hold the password in every way there is."""
    host, port = walled.address
    place = f"{host}:{port}"
    login = f"walled:{quote(SECRET, safe='')}"
    return {
        "before the host": f"pgnotify://{login}@{place}/{database_name}",
        "in the query": f"pgnotify://walled@{place}/{database_name}?password={quote_plus(SECRET)}",
        "with two hosts": f"pgnotify://{login}@{host}:1,{place}/{database_name}",
    }


FORMS = ["before the host", "in the query", "with two hosts"]


def command(*words: str, url: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "celery", "-A", APP, *words],
        cwd=REPOSITORY,
        env={**os.environ, "CELERY_BROKER_URL": url, "CELERY_CONFIG": "", **env},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("form", FORMS)
def test_celerys_own_reports_mask_the_password(form: str, urls: dict[str, str]) -> None:
    with Celery("x", set_as_current=False) as app:
        app.conf.update(broker_url=urls[form], broker_read_url=urls[form])
        with app.connection() as connection:
            shown = [app.bugreport(), repr(app.conf.table(censored=True)), repr(connection)]
    assert "broker_url" in shown[0]
    assert found_in("\n".join(shown)) == []


def test_a_worker_and_those_who_ask_it_print_no_password(
    urls: dict[str, str],
    walled: Server,
    database: str,
    celery_worker: Callable[..., CeleryWorker],
    tmp_path: Path,
) -> None:
    """At its most talkative, through failing tasks, lost connections and a restarted pool."""
    url = urls["before the host"]
    with Connection(url) as connection:
        connection.connect()
    env = {"PGNOTIFY_TEST_CONFIG": json.dumps({"worker_pool_restarts": True, "broker_url": url})}
    worker = celery_worker(
        APP,
        broker_url=url,
        args=["-E", "-l", "DEBUG"],
        env={**env, "PGNOTIFY_TEST_RECORD_URL": database},
    )
    asked = [
        "report", "inspect conf", "inspect stats", 'call tests.celery.app.fail --args=["x"]',
    ]  # fmt: skip
    said = [command(*words.split(), url=url, **env) for words in asked]
    assert [done.returncode for done in said] == [0] * len(asked), said
    # As it is: what was asked for has been answered.
    assert worker.name in said[2].stdout
    worker.wait_log("raised unexpected: ")
    worker.signal(signal.SIGUSR1)
    walled.run_sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'walled'"
    )
    worker.wait_log("listener.lost")
    done = command("control", "pool_restart", url=url, **env)
    assert found_in(done.stdout + done.stderr) == []
    shown = walled.run_sql("SELECT application_name, query FROM pg_stat_activity")
    for process in (psutil.Process(worker.pid), *psutil.Process(worker.pid).children(True)):
        with suppress(psutil.Error):  # the pool has just been restarted
            shown.append((process.name(), " ".join(process.cmdline())))
    assert len(shown) > 2
    assert worker.stop() == 0
    for text in (*(done.stdout + done.stderr for done in said), worker.log(), repr(shown)):
        assert found_in(text) == []
    # What our own server saw.
    assert found_in(walled.embedded.log_path.read_text("utf-8", "replace").replace(
        f"PASSWORD '{SECRET}'", "")) == []  # fmt: skip


MISTAKES: dict[str, Callable[[str, str], tuple[str, dict[str, Any]]]] = {
    "a wrong password": lambda url, name: (url.replace("s3cr3t", "s3cr3t-wrong"), {}),
    "no such database": lambda url, name: (url.replace(name, "nowhere"), {}),
    "no such host": lambda url, name: (url.replace("127.0.0.1", "nowhere.invalid"), {}),
    "nobody listens": lambda url, name: (url.replace("/test_", "1/test_"), {}),
    "an unknown option": lambda url, name: (url, {"schemma": "x"}),
    "a wrong option": lambda url, name: (url, {"schema": "pg_x"}),
    "a listen_url with a password": lambda url, name: (url, {"listen_url": url}),
    "an option in the password's place": lambda url, name: (url, {"application_name": 5}),
    "not encoded": lambda url, name: (url.replace(quote(SECRET, safe=""), SECRET), {}),
    "no right to create": lambda url, name: (url.replace(name, "postgres"), {}),
    "a surrogate in it": lambda url, name: (url.replace("s3cr3t", "s3cr3t%ED%A0%80\ud800"), {}),
    "a NUL in it": lambda url, name: (url.replace("s3cr3t", "s3cr3t%00"), {}),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_no_error_log_or_traceback_shows_the_password(
    mistake: str,
    form: str,
    urls: dict[str, str],
    database_name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    url, options = MISTAKES[mistake](urls[form], database_name)
    shown = []
    connection = Connection(url, transport_options=options)
    try:
        connection.connect()
        shown.append("connected")
    except Exception as error:
        shown += traceback.format_exception(error)
        shown += [repr(error), str(error), repr(error.args)]
        if not isinstance(error, (PgnotifyError, OSError)):
            raise
    finally:
        connection.release()
    shown += [repr(connection), connection.as_uri(), str(connection)]
    info = dict(connection.info())
    # As Celery's own stats command does; what is refused in the options is none of ours yet.
    for name in ("password", "transport_options"):
        info.pop(name)
    assert found_in("\n".join([*shown, repr(info), caplog.text])) == []


def test_no_object_of_ours_shows_or_pickles_the_password(
    urls: dict[str, str], connect: Callable[..., Connection]
) -> None:
    connection = connect(urls["before the host"])
    broker = connection.transport.broker
    shown = [broker, broker.database, broker.options, broker.options.target, broker.keeper,
             connection.transport, connection.default_channel, broker.listener]  # fmt: skip
    for thing in shown:
        assert found_in(f"{thing!r} {thing}") == []
    assert found_in(str(broker.options.target.conninfo)) == []
    with pytest.raises(Exception, match=r"pickle|lock|Token") as error:
        pickle.dumps(broker)
    assert found_in(str(error.value)) == []


def test_a_password_that_changes_shows_neither_the_old_nor_the_new(
    walled: Server,
    urls: dict[str, str],
    connect: Callable[..., Connection],
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    connection = connect(urls["before the host"])
    walled.run_sql(f"ALTER ROLE walled PASSWORD '{OTHER}'")
    try:
        walled.run_sql(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'walled'"
        )
        shown: list[str] = []

        def refused() -> bool:
            with pytest.raises(PgnotifyError) as error:
                connection.transport.broker.database.acquire()
            shown.extend(traceback.format_exception(error.value))
            return "refuses the login now" in str(error.value)

        wait_until(refused)
        assert found_in("".join(shown) + caplog.text) == []
    finally:
        walled.run_sql(f"ALTER ROLE walled PASSWORD '{SECRET}'")
