"""``python -m kombu_pgnotify demo``: a real Celery worker on a real PostgreSQL, in one minute.

Nothing is imported here: the worker loads this package on its way to :mod:`.app`.
"""

from __future__ import annotations
