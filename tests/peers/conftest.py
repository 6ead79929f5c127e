"""What kombu's integration tests want to be given, each with a database of its own.

The tests come from kombu's sdist; ``tox -e peers`` unpacks it and names the folder. Without it
there is nothing to collect.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import kombu
import pytest
from fix_postgres import Server

from kombu_pgnotify.embedded import HOST, free_port

FOLDER_VARIABLE = "PGNOTIFY_PEER_SUITES"

if folder := os.environ.get(FOLDER_VARIABLE):
    # At the end: nothing of theirs may hide what is installed.
    sys.path.append(str(Path(folder) / f"kombu-{kombu.__version__}" / "t"))
    pytest.register_assert_rewrite("integration.common")
else:
    collect_ignore = ["test_kombu.py"]


@pytest.fixture
def dead_url(server: Server, database_name: str) -> str:
    """The URL of the database on a port where nobody listens."""
    return server.url(database_name, scheme="pgnotify", address=(HOST, free_port()))


@pytest.fixture
def connection(broker_url: str) -> Iterator[kombu.Connection]:
    with kombu.Connection(broker_url) as made:
        yield made


@pytest.fixture
def invalid_connection(dead_url: str) -> Iterator[kombu.Connection]:
    with kombu.Connection(dead_url) as made:
        yield made


@pytest.fixture
def failover_connection(dead_url: str, broker_url: str) -> Iterator[kombu.Connection]:
    # kombu leaves the first URL to the transport, which reads it later: the port, which one test
    # asks for at once, is given beside it.
    port = urlsplit(dead_url).port
    with kombu.Connection(f"{dead_url};{broker_url}", port=port) as made:
        yield made
