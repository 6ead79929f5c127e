"""What can go wrong, sorted by who has to act.

Driver errors are turned into these once, in :mod:`kombu_pgnotify.database`;
nothing above that module sees a psycopg or SQLAlchemy exception.
"""

from __future__ import annotations


class PgnotifyError(Exception):
    """Base of every error this package raises."""


class DatabaseUnavailable(PgnotifyError):
    """The database cannot serve us just now; trying again is right.

    Refused, lost, frozen, restarting, read-only or overloaded servers and
    statements that ran out of time end up here.  The only class of ours in
    ``Transport.connection_errors``: Celery reconnects on it, kombu's
    publishing retries on it.
    """


class StatementFailed(PgnotifyError):
    """The database understood the statement and refused these values.

    Trying again with the same values fails again: a queue name that holds a
    NUL, for instance.  In ``Transport.channel_errors``.
    """


class ConfigurationError(PgnotifyError, ValueError):
    """Somebody has to change a URL, an option, a right or a server.

    Neither a connection nor a channel error: retrying would only hide it.
    """
