"""A password appears in nothing a worker prints, and mistakes end it with one sentence."""

from __future__ import annotations

from collections.abc import Callable
from urllib.parse import quote

import pytest
from fix_cluster import Cluster
from fix_postgres import Server
from fix_worker import CeleryWorker
from kombu import Connection

SECRET = "s3cr3t/p@ss:w?rd%"
WITH_PASSWORDS = {"hba": ["host all walled 127.0.0.1/32 scram-sha-256"]}


@pytest.fixture
def walled_url(own_server: Server) -> str:
    """The URL of a database of a role with a password."""
    own_server.run_sql(f"CREATE ROLE walled LOGIN PASSWORD '{SECRET}'")
    name = own_server.create_database()
    own_server.run_sql(f"ALTER DATABASE {name} OWNER TO walled")
    return own_server.url(name, scheme="pgnotify", user="walled", password=SECRET)


def _traces(secret: str) -> list[str]:
    """The password as it is, as a URL holds it, and pieces nobody prints by chance."""
    return [secret, quote(secret, safe=""), "s3cr3t"]


@pytest.mark.parametrize("own_server", [WITH_PASSWORDS], indirect=True)
def test_a_worker_prints_no_password_whatever_happens(
    own_server: Server, walled_url: str, celery_worker: Callable[..., CeleryWorker]
) -> None:
    worker = celery_worker(
        "kombu_pgnotify.demo.app", pool="solo", broker_url=walled_url, args=["-l", "DEBUG"]
    )
    own_server.run_sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'walled'"
    )
    worker.wait_log("listener.lost")
    own_server.run_sql("ALTER ROLE walled PASSWORD 'changed'")
    own_server.run_sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'walled'"
    )
    # Not at its first connect: a worker that has run waits for the password to work again.
    worker.wait_log("refuses the login now")
    worker.kill()
    assert [trace for trace in _traces(SECRET) if trace in worker.log()] == []


@pytest.mark.parametrize("own_server", [WITH_PASSWORDS], indirect=True)
def test_a_wrong_password_ends_the_worker_with_one_sentence(
    own_server: Server, walled_url: str, celery_worker: Callable[..., CeleryWorker]
) -> None:
    wrong = walled_url.replace(quote(SECRET, safe=""), "s3cr3t-but-wrong")
    worker = celery_worker("kombu_pgnotify.demo.app", pool="solo", broker_url=wrong, wait=False)
    assert worker.wait() != 0
    assert "refuses the login: " in worker.log()
    assert "s3cr3t" not in worker.log()


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("?visibility_timout=5", "did you mean 'visibility_timeout'?"),
        ("?sslmod=require", "did you mean 'sslmode'?"),
        ("?schema=pg_mine", "which PostgreSQL reserves"),
    ],
)
def test_a_wrong_option_ends_the_worker_with_one_sentence(
    broker_url: str, celery_worker: Callable[..., CeleryWorker], query: str, sentence: str
) -> None:
    worker = celery_worker(
        "kombu_pgnotify.demo.app", pool="solo", broker_url=broker_url + query, wait=False
    )
    assert worker.wait() != 0
    assert sentence in worker.log()


def test_what_inspect_stats_shows_of_a_connection_holds_no_password(broker_url: str) -> None:
    url = broker_url.replace("postgres@", f"postgres:{quote(SECRET, safe='')}@")
    with Connection(url) as connection:
        for shown in (connection, connection.clone()):
            info = dict(shown.info())
            info.pop("password")  # as Celery's own stats command does
            text = f"{info} {shown!r} {shown.as_uri()}"
            assert [trace for trace in _traces(SECRET) if trace in text] == []


def test_two_workers_that_start_at_once_on_an_empty_database_both_run(cluster: Cluster) -> None:
    workers = [cluster.worker("solo", wait=False) for _ in range(3)]
    for worker in workers:
        worker.wait_log("ready.")
    cluster.tasks.record.delay("one")
    cluster.wait_happened("done", {"one"})
