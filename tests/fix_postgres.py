"""The PostgreSQL the tests use, and a fresh database for each test.

It is the server of ``PGNOTIFY_TEST_URL`` (the URL of a superuser), else an embedded one that
lives as long as the run; under pytest-xdist each worker has its own. With neither, tests that
need a server are skipped, or fail where the environment says ``CI``.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote, urlsplit, urlunsplit

import psycopg
import pytest

from kombu_pgnotify.embedded import (
    EmbeddedPostgres,
    EmbeddedPostgresError,
    binaries_version,
    find_binaries,
)

URL_VARIABLE = "PGNOTIFY_TEST_URL"
HEADER_CONNECT_TIMEOUT = 5  # seconds; only for the line in pytest's header
FILE_COPY_SINCE = 150000  # the default before, and not to be asked for by name


class Server:
    """A PostgreSQL server, known by the URL of its superuser."""

    def __init__(self, url: str, embedded: EmbeddedPostgres | None = None) -> None:
        self._parts = urlsplit(url)
        self._embedded = embedded
        self.version_num = int(self.run_sql("SHOW server_version_num")[0][0])

    @property
    def owned(self) -> bool:
        """Whether the server is ours, and so may be restarted and configured."""
        return self._embedded is not None

    @property
    def embedded(self) -> EmbeddedPostgres:
        """The process behind the server; skips the test if that is not ours."""
        if self._embedded is None:
            pytest.skip(f"needs a server of our own, not the one of {URL_VARIABLE}")
        return self._embedded

    @property
    def address(self) -> tuple[str, int]:
        """The host and TCP port; skips the test if the server has none."""
        if not self._parts.hostname:
            pytest.skip("needs a server that listens on TCP")
        return self._parts.hostname, self._parts.port or 5432

    def url(
        self,
        dbname: str | None = None,
        *,
        scheme: str = "postgresql",
        user: str | None = None,
        password: str | None = None,
        address: tuple[str, int] | None = None,
    ) -> str:
        """Return the URL of a database, changed in the parts given.

        A user is named without the superuser's password.
        """
        login, _, place = self._parts.netloc.rpartition("@")
        if user is not None:
            login = quote(user, safe="")
        if password is not None:
            login = f"{login.partition(':')[0]}:{quote(password, safe='')}"
        if address is not None:
            place = f"{address[0]}:{address[1]}"
        path = self._parts.path if dbname is None else f"/{quote(dbname, safe='')}"
        netloc = f"{login}@{place}" if login else place
        return urlunsplit((scheme, netloc, path, self._parts.query, ""))

    def run_sql(
        self, sql: str, dbname: str | None = None, params: Sequence[Any] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run a statement as superuser, outside of a transaction, and return its rows."""
        with psycopg.connect(self.url(dbname), autocommit=True) as connection:
            cursor = connection.execute(sql.encode(), params)
            return cursor.fetchall() if cursor.description else []

    def restart(self, mode: str = "immediate") -> None:
        """Restart the server on the same port; skips the test if it is not ours."""
        self.embedded.restart(mode)

    def create_database(self) -> str:
        """Create an empty database and return its name."""
        name = f"test_{uuid.uuid4().hex[:16]}"
        # Without fsync the files are copied faster than they are written through the WAL.
        strategy = "STRATEGY file_copy" if self.version_num >= FILE_COPY_SINCE else ""
        self.run_sql(f"CREATE DATABASE {name} TEMPLATE template0 {strategy}")
        return name

    def drop_database(self, name: str) -> None:
        """Drop the database, and the connections a test has left open to it."""
        self.run_sql(f"DROP DATABASE IF EXISTS {name} WITH (FORCE)")


def pytest_report_header(config: pytest.Config) -> str:
    if url := os.environ.get(URL_VARIABLE):
        try:
            with psycopg.connect(url, connect_timeout=HEADER_CONNECT_TIMEOUT) as connection:
                version = connection.info.parameter_status("server_version")
                return f"postgresql: {version} of {URL_VARIABLE}, {connection.info.host}"
        except psycopg.Error as error:
            return f"postgresql: {URL_VARIABLE} does not answer: {error}"
    try:
        bindir = find_binaries()
    except EmbeddedPostgresError as error:
        return f"postgresql: none. {error}"
    return f"postgresql: {binaries_version(bindir)} started from {bindir}"


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    """The server of this run. A test that restarts it should use `own_server` instead."""
    if url := os.environ.get(URL_VARIABLE):
        yield Server(url)
        return
    try:
        find_binaries()
    except EmbeddedPostgresError as error:
        give_up = pytest.fail if os.environ.get("CI") else pytest.skip
        give_up(f"{error} Or set {URL_VARIABLE} to the URL of a server's superuser.")
    with EmbeddedPostgres(fast=True) as embedded:
        yield Server(embedded.url(), embedded)


@pytest.fixture
def own_server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """A server of this test alone, which it may restart.

    Parametrized with indirect=True it takes a dict of more arguments for EmbeddedPostgres.
    """
    try:
        find_binaries()
    except EmbeddedPostgresError as error:
        pytest.skip(str(error))
    with EmbeddedPostgres(fast=True, **getattr(request, "param", {})) as embedded:
        yield Server(embedded.url(), embedded)


@pytest.fixture
def database_name(server: Server) -> Iterator[str]:
    """The name of an empty database of this test, for the URLs of a proxy or another user."""
    name = server.create_database()
    yield name
    server.drop_database(name)


@pytest.fixture
def database(server: Server, database_name: str) -> str:
    """The URL of this test's database."""
    return server.url(database_name)


@pytest.fixture
def broker_url(database: str) -> str:
    """The URL of this test's database, for kombu."""
    return database.replace("postgresql://", "pgnotify://", 1)
