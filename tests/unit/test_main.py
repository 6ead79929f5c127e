"""The command line: `upgrade`, `sql` and how they complain."""

from __future__ import annotations

import subprocess
import sys

import psycopg
import pytest

from kombu_pgnotify import __main__ as command_line, __version__, broker, options, schema, urls
from kombu_pgnotify.errors import ConfigurationError

SECRET = "s3cr3t"
NOBODY_LISTENS = "127.0.0.1:1"
ODD_SCHEMA = 'Odd "schema" {schema}'


def accepts(url: str, name: str) -> None:
    """Let the transport check the schema, which it may not create."""
    chosen = options.build(urls.parse(url, options.NAMES), {"schema": name})
    session = broker.for_options(chosen).database.open()
    try:
        schema.ensure(session, name, create=False)
    finally:
        session.close()


def tables(url: str, name: str) -> dict[str, int] | None:
    """The tables and indexes of a schema with their ids, which a new one does not share."""
    with psycopg.connect(url) as connection:
        names: dict[str, int] | None = connection.execute(
            "SELECT json_object_agg(relname, c.oid::bigint) FROM pg_class c "
            "JOIN pg_namespace n ON n.oid = relnamespace WHERE nspname = %s",
            [name],
        ).fetchone()[0]
        return names


def test_is_a_module_to_run():
    command = [sys.executable, "-m", "kombu_pgnotify", "--version"]
    assert subprocess.check_output(command, text=True).strip() == f"kombu_pgnotify {__version__}"


def test_only_the_demo_needs_celery():
    program = (
        "import sys; sys.modules.update(celery=None, rich=None)\n"
        "from kombu_pgnotify.__main__ import main; main(['sql'])"
    )
    assert "CREATE TABLE" in subprocess.check_output([sys.executable, "-c", program], text=True)


@pytest.mark.parametrize("name", ["pgnotify", ODD_SCHEMA])
def test_sql_gives_a_schema_the_transport_accepts(broker_url, database, name, capsys):
    with pytest.raises(ConfigurationError):
        accepts(broker_url, name)
    assert command_line.main(["sql", "--schema", name]) == 0
    script, complaints = capsys.readouterr()
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(script)
    accepts(broker_url, name)
    assert complaints == ""


def test_sql_and_upgrade_give_the_same(broker_url, database, capsys):
    command_line.main(["sql", "--schema", "one"])
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(capsys.readouterr().out)
    command_line.main(["upgrade", broker_url, "--schema", "two"])
    assert set(tables(database, "one")) == set(tables(database, "two"))


@pytest.mark.parametrize("scheme", ["pgnotify", "postgresql", "postgres"])
def test_upgrade_is_idempotent(database, scheme, capsys):
    url = database.replace("postgresql", scheme, 1)
    assert command_line.main(["upgrade", url, "--schema", "ours"]) == 0
    first_answer, first = capsys.readouterr(), tables(database, "ours")
    assert command_line.main(["upgrade", url, "--schema", "ours"]) == 0
    assert capsys.readouterr() == first_answer
    assert tables(database, "ours") == first
    assert f"Schema 'ours' is at version {schema.VERSION} on " in first_answer.out
    accepts(database, "ours")


def test_upgrade_takes_the_schema_of_the_url(broker_url, database):
    question = "&" if "?" in broker_url else "?"
    assert command_line.main(["upgrade", f"{broker_url}{question}schema=from_url"]) == 0
    assert tables(database, "from_url")
    assert not tables(database, "pgnotify")


def test_role_without_rights(server, database_name, capsys):
    server.run_sql(f"REVOKE CREATE ON DATABASE {database_name} FROM PUBLIC")
    server.run_sql(f"CREATE ROLE powerless LOGIN PASSWORD '{SECRET}'")
    try:
        url = server.url(database_name, user="powerless", password=SECRET)
        assert command_line.main(["upgrade", url]) == 1
    finally:
        server.run_sql("DROP ROLE powerless")
    shown, complaint = capsys.readouterr()
    assert "'powerless' may not create schema" in complaint
    assert SECRET not in shown + complaint


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["upgrade", f"pgnotify://me:{SECRET}@{NOBODY_LISTENS}/db"], "Connection refused"),
        (["upgrade", f"pgnotify://me:{SECRET}@{NOBODY_LISTENS}/db?schem=x"], "'schema'"),
        (["upgrade", f"pgnotify://me:{SECRET}@host:port/db"], "no valid port"),
        (["upgrade", f"redis://me:{SECRET}@{NOBODY_LISTENS}/db"], "not the URL of a PostgreSQL"),
        (["upgrade", f"me:{SECRET}@{NOBODY_LISTENS}/db"], "not the URL of a PostgreSQL"),
        (["demo", "--url", f"redis://me:{SECRET}@{NOBODY_LISTENS}/"], "not the URL of a Post"),
        (["demo", "--url="], "not the URL of a PostgreSQL"),
        (["sql", "--schema", "pg_mine"], "'pg_'"),
        (["sql", "--schema", ""], "non-empty"),
    ],
)
def test_complains_in_one_sentence(arguments, sentence, capsys):
    assert command_line.main(arguments) == 1
    shown, complaint = capsys.readouterr()
    assert sentence in complaint
    assert complaint.count("\n") == 1
    assert shown == ""
    assert SECRET not in complaint


@pytest.mark.parametrize(
    "arguments",
    [
        [f"pgnotify://me:{SECRET}@host/db"],
        ["sql", f"pgnotify://me:{SECRET}@host/db"],
        ["sql", f"pgnotify://me:p@ss/{SECRET}@host/db"],
    ],
)
def test_usage_errors_hide_the_password(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == 2
    complaint = capsys.readouterr().err
    assert "pgnotify://**@host/db" in complaint
    assert SECRET not in complaint


def test_demo_names_the_extra(monkeypatch, capsys):
    monkeypatch.setattr(command_line, "DEMO_PACKAGES", ("celery", "surely_not_installed"))
    assert command_line.main(["demo"]) == 1
    complaint = capsys.readouterr().err
    assert "surely_not_installed" in complaint
    assert "pip install 'kombu-pgnotify[demo]'" in complaint
