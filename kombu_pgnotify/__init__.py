"""A kombu and Celery broker on PostgreSQL: ``broker_url = "pgnotify://user:pw@host/db"``.

Celery finds the ``pgnotify`` scheme by itself, through an entry point of this package.
An application on plain kombu imports this package once, which registers the scheme too.

Nothing here imports psycopg, SQLAlchemy or Celery: gevent and eventlet must be able to patch
the standard library before those see it.
"""

from __future__ import annotations

from kombu_pgnotify._register import register_transport

__version__ = "0.1.0"

__all__ = ["__version__"]

register_transport()
