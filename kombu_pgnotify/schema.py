"""The schema: checked, created and upgraded once, under an advisory lock."""

from __future__ import annotations

import hashlib
import logging

import psycopg

from . import sql
from .errors import ConfigurationError, DatabaseUnavailable
from .session import Session

logger = logging.getLogger(__name__)

#: PostgreSQL 14, the oldest supported major.
OLDEST_SERVER = 140000

#: The schema this code was written for: the number of the newest migration.
VERSION = max(sql.migrations())

#: What the names in a migration mean must not depend on who may create functions where.
_PINNED = "SET LOCAL search_path = pg_catalog, pg_temp"

#: Words that make our advisory lock's key differ from everybody else's.
_LOCK_NAME = "kombu_pgnotify schema "


def ensure(session: Session, schema: str, *, create: bool) -> None:
    """Check server, rights and schema; create or upgrade the schema if `create`.

    Safe to call from any number of processes at once.

    Raises:
        ConfigurationError: somebody has to act; the message says who and how.
        DatabaseUnavailable: the server is a standby just now.
        psycopg.Error: anything the caller maps.
    """
    known = sql.statements(schema)
    state = session.run((known["schema_state"], (schema,)))[0][0]
    server, in_recovery, role, _, has_tables = state
    if server < OLDEST_SERVER:
        raise ConfigurationError(
            f"PostgreSQL {server // 10000} is too old: kombu_pgnotify needs 14 or newer"
        )
    if in_recovery:
        raise DatabaseUnavailable(
            "the server is a standby, which takes no writes: name all hosts in the broker URL, "
            "so that the primary is found"
        )
    version = _version(session, schema, role) if has_tables else 0
    if version > VERSION:
        raise ConfigurationError(
            f"schema {schema!r} is at version {version}, this kombu_pgnotify knows only "
            f"{VERSION}: install the newer kombu_pgnotify here too"
        )
    if version == VERSION:
        return
    if not create:
        raise ConfigurationError(
            f"schema {schema!r} is {_how_far(version)} and create_schema is off: "
            f"run 'python -m kombu_pgnotify upgrade URL' with a role that may create tables"
        )
    _upgrade(session, schema, role)


def script(schema: str, since: int = 0) -> str:
    """Return the SQL that brings `schema` from version `since` to :data:`VERSION`.

    For a DBA to read and apply; it runs in one transaction.
    """
    parts = [
        "BEGIN;",
        f"{_PINNED};",
        f"CREATE SCHEMA IF NOT EXISTS {sql.quote_identifier(schema)};",
    ]
    for version in range(since + 1, VERSION + 1):
        parts.append(_migration(version, schema))
    return "\n".join([*parts, "COMMIT;", ""])


def _how_far(version: int) -> str:
    return f"at version {version}, older than {VERSION}" if version else "missing"


def _migration(version: int, schema: str) -> str:
    """Return the text of a migration and of its entry in the books."""
    quoted = sql.quote_identifier(schema)
    return (
        sql.migration(version, schema)
        + f"\nINSERT INTO {quoted}.migrations (version) VALUES ({version});"
    )


def _version(session: Session, schema: str, role: str) -> int:
    try:
        ((version,),) = session.run((sql.statements(schema)["schema_version"], ()))[0]
    except psycopg.errors.InsufficientPrivilege as exc:
        quoted, grantee = sql.quote_identifier(schema), sql.quote_identifier(role)
        raise ConfigurationError(
            f"role {role!r} may not read schema {schema!r}: GRANT USAGE ON SCHEMA {quoted} TO "
            f"{grantee}; GRANT SELECT ON {quoted}.migrations TO {grantee}"
        ) from exc
    return int(version)


def _upgrade(session: Session, schema: str, role: str) -> None:
    """Apply the missing migrations in one transaction."""
    quoted = sql.quote_identifier(schema)
    try:
        # The lock waits for whoever creates or upgrades at this moment; then look again.
        session.script(f"BEGIN; {_PINNED}; SELECT pg_advisory_xact_lock({_lock_key(schema)})")
        state = session.run((sql.statements(schema)["schema_state"], (schema,)))[0][0]
        _, _, _, has_schema, has_tables = state
        if not has_schema:
            # Not IF NOT EXISTS, which asks for the right to create even where it exists.
            session.script(f"CREATE SCHEMA {quoted}")
        version = _version(session, schema, role) if has_tables else 0
        for missing in range(version + 1, VERSION + 1):
            logger.info("schema.migrate schema=%r version=%d", schema, missing)
            session.script(_migration(missing, schema))
        session.script("COMMIT")
    except psycopg.errors.InsufficientPrivilege as exc:
        raise ConfigurationError(
            f"role {role!r} may not create schema {schema!r} or its tables: run "
            f"'python -m kombu_pgnotify upgrade URL' once with a role that may, "
            f"or GRANT CREATE ON DATABASE to {role!r}"
        ) from exc


def _lock_key(schema: str) -> int:
    """Return the key of the advisory lock, a signed 64-bit number."""
    digest = hashlib.sha256((_LOCK_NAME + schema).encode()).digest()
    return int.from_bytes(digest[:8], "big", signed=True)
