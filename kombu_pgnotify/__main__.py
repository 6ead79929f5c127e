"""The command line: ``python -m kombu_pgnotify demo``, ``upgrade``, ``sql``, ``dead-letters``."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from . import __version__, broker, options, schema, urls
from .dead_letters import DeadLetter, DeadLetters
from .errors import ConfigurationError, PgnotifyError
from .options import Options
from .urls import Target

#: Schemes of a URL that is for us: Celery's, and those of libpq, which people have at hand.
SCHEMES = ("pgnotify", "postgresql", "postgres")

#: Packages of the extra `demo` without which there is none.
DEMO_PACKAGES = ("celery", "rich")

URL_HELP = (
    "where the database is: pgnotify://user@host/database (or postgresql://...); "
    "a password is better left to PGPASSWORD or ~/.pgpass, since others may see command lines"
)
SCHEMA_HELP = "schema that holds the tables, the transport option of this name (default: pgnotify)"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit code."""
    given = _parser().parse_args(arguments)
    try:
        return int(given.command(given))
    except PgnotifyError as exc:
        print(exc, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


class Parser(argparse.ArgumentParser):
    """Complains without passwords: argparse repeats what it does not understand."""

    def error(self, message: str) -> NoReturn:
        """Exit with the message."""
        super().error(re.sub(r"://\S*@", "://**@", message))


def _parser() -> Parser:
    parser = Parser(
        prog="python -m kombu_pgnotify",
        description="A kombu and Celery broker on PostgreSQL.",
    )
    parser.add_argument("--version", action="version", version=f"kombu_pgnotify {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    demo = _command(commands, "demo", _demo, "show it: a real Celery worker, in a minute")
    demo.description = (
        "Starts a PostgreSQL in a temporary folder and a real Celery worker on it, sends tasks, "
        "kills the worker, and removes everything. Needs: pip install 'kombu-pgnotify[demo]'."
    )
    demo.add_argument(
        "--url", help=f"use this server instead, in a schema that is dropped again; {URL_HELP}"
    )
    upgrade = _command(commands, "upgrade", _upgrade, "create the schema or bring it up to date")
    upgrade.description = (
        "Creates the schema, or brings it up to date, with a role that may do so: for workers "
        "whose own role may not (create_schema=False). Does no harm where nothing is to do."
    )
    upgrade.add_argument("url", metavar="URL", help=URL_HELP)
    upgrade.add_argument("--schema", metavar="S", help=SCHEMA_HELP)
    sql = _command(commands, "sql", _sql, "print the SQL that creates the schema")
    sql.description = (
        "Prints what 'upgrade' would do in an empty database, for a DBA to read and apply with "
        "psql. The role of the workers then needs rights on it."
    )
    sql.add_argument("--schema", metavar="S", help=SCHEMA_HELP)
    _add_dead_letters(commands)
    return parser


def _add_dead_letters(commands: Any) -> None:
    dead = _command(
        commands, "dead-letters", _dead_letters, "list, requeue or delete what was put away"
    )
    dead.description = (
        "Lists the messages that were rejected, could not be read, or were delivered too often, "
        "the latest first. --requeue sends them again, as new messages; --delete deletes them."
    )
    dead.add_argument("url", metavar="URL", help=URL_HELP)
    dead.add_argument("--schema", metavar="S", help=SCHEMA_HELP)
    dead.add_argument("--queue", metavar="Q", help="only those of this queue")
    dead.add_argument(
        "--limit", metavar="N", type=_number(2**31), default=100, help="list so many (100)"
    )
    action = dead.add_mutually_exclusive_group()
    for name, what in (("--requeue", "put them back to their queues"), ("--delete", "delete them")):
        action.add_argument(name, metavar="ID", type=_number(2**63), nargs="*", help=what)
    dead.add_argument("--all", action="store_true", help="requeue or delete without naming any ID")


def _number(end: int) -> Callable[[str], int]:
    """Return what reads a whole number from 1 up to, but not including, `end`."""

    def read(text: str) -> int:
        if not (text.isdecimal() and 0 < int(text) < end):
            raise argparse.ArgumentTypeError(f"not a number from 1 to {end - 1}: {text!r}")
        return int(text)

    return read


def _command(commands: Any, name: str, function: Any, text: str) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=text)
    command.set_defaults(command=function)
    return command


def _demo(given: argparse.Namespace) -> int:
    missing = [name for name in DEMO_PACKAGES if not importlib.util.find_spec(name)]
    if missing:
        raise ConfigurationError(
            f"the demo needs {' and '.join(missing)} too: pip install 'kombu-pgnotify[demo]'"
        )
    from .demo import story

    return story.run(None if given.url is None else _broker_url(given.url))


def _upgrade(given: argparse.Namespace) -> int:
    target = urls.parse(_broker_url(given.url), options.NAMES)
    chosen = _options(target, given.schema)
    database = broker.for_options(chosen).database
    session = database.open()
    try:
        with database.mapped_errors():
            schema.ensure(session, chosen.schema, create=True)
    finally:
        session.close()
    print(f"Schema {chosen.schema!r} is at version {schema.VERSION} on {target.describe()}.")
    return 0


def _dead_letters(given: argparse.Namespace) -> int:
    target = urls.parse(_broker_url(given.url), options.NAMES)
    letters = DeadLetters(broker.for_options(_options(target, given.schema)).database)
    if given.requeue is None and given.delete is None:
        for letter in letters.find(given.queue, limit=given.limit):
            print(_line(letter))
        return 0
    ids = given.requeue or given.delete or None
    if ids is None and not given.all:
        raise ConfigurationError("which ones? Name their IDs, or say --all")
    if given.delete is None:
        print(f"{letters.requeue(given.queue, ids)} requeued.")
    else:
        print(f"{letters.delete(given.queue, ids)} deleted.")
    return 0


def _line(letter: DeadLetter) -> str:
    """Write a dead letter on one line; what others have written must not control a terminal."""
    text = (
        f"{letter.dead_letter_id}  {letter.dead_at}  queue {letter.queue}  "
        f"{letter.task or '(no task)'}  attempts {letter.attempts}  "
        f"last worker {letter.worker or '(none)'}  {letter.reason}"
    )
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in text)


def _sql(given: argparse.Namespace) -> int:
    print(schema.script(_options(Target(), given.schema).schema), end="")
    return 0


def _options(target: Target, schema_name: str | None) -> Options:
    return options.build(target, {} if schema_name is None else {"schema": schema_name})


def _broker_url(url: str) -> str:
    """Return `url` with the scheme Celery knows; the text may hold a password, so is not shown."""
    scheme, separator, rest = url.partition("://")
    if not separator or scheme not in SCHEMES:
        raise ConfigurationError(
            "this is not the URL of a PostgreSQL: it begins with pgnotify:// or postgresql://"
        )
    return f"pgnotify://{rest}"


if __name__ == "__main__":
    sys.exit(main())
