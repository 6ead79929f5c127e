"""Loads the SQL files: every statement by name, every migration by number."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

_NAME = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
_MIGRATION = re.compile(r"^(\d{4})_\w+\.sql$")


class Statement(NamedTuple):
    """One named SQL statement, ready for a schema."""

    name: str
    sql: bytes


def quote_identifier(name: str) -> str:
    """Quote `name` as an SQL identifier; any character but NUL is allowed."""
    return '"' + name.replace('"', '""') + '"'


@cache
def statements(schema: str) -> dict[str, Statement]:
    """Return every statement of the ``.sql`` files for the (unquoted) `schema`."""
    parts: list[str] = []
    for entry in files(__name__).iterdir():
        if entry.name.endswith(".sql"):
            parts += _NAME.split(entry.read_text(encoding="utf-8"))[1:]
    quoted = quote_identifier(schema)
    return {
        name: Statement(name, _strip(body).replace("{schema}", quoted).encode())
        for name, body in zip(parts[::2], parts[1::2], strict=True)
    }


@cache
def migrations() -> dict[int, str]:
    """Return the text of every migration by its number, in order."""
    folder = files(__name__) / "migrations"
    found = {}
    for entry in folder.iterdir():
        if match := _MIGRATION.match(entry.name):
            found[int(match[1])] = entry.read_text(encoding="utf-8")
    return dict(sorted(found.items()))


def migration(version: int, schema: str) -> str:
    """Return migration `version` with the (unquoted) `schema` filled in."""
    return migrations()[version].replace("{schema}", quote_identifier(schema))


def _strip(body: str) -> str:
    """Drop comment lines and the closing semicolon: they would be sent each time."""
    lines = (line for line in body.splitlines() if not line.lstrip().startswith("--"))
    return "\n".join(lines).strip().rstrip(";")
