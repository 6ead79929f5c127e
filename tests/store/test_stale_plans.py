"""What was planned while the tables were empty still walks the right index when they have filled.

A worker that idles plans its statements on empty tables, and keeps the plans: the server makes new
ones only after the next ANALYZE, up to a minute later.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

import psycopg
import pytest
from fix_postgres import Server
from plans import (
    BINDINGS,
    EVERYTHING,
    FEW,
    FILL,
    FILL_TOPOLOGY,
    FUTURE,
    LEASED,
    MESSAGE,
    OF_ONE_QUEUE,
    QUEUES,
    READY,
    TABLES,
    TYPES,
    Plan,
)

from kombu_pgnotify import database as database_module, options, sql as queries, urls
from kombu_pgnotify.broker import Broker

#: The ids of ten messages that are leased, see FILL.
SETTLED = "'{1,2,3,4,5,6,7,8,9,10}', '{1,1,1,1,1,1,1,1,1,1}'"

#: What each statement is given, and how many pages it may touch beside LEASED rows at the head of
#: the queue and EXPIRING ones; the tables have thousands.
CALLS: dict[str, tuple[str, int]] = {
    "claim": (f"'queue1', '{{-1}}', '{{{LEASED}}}', '{{32767}}', 10, 'me', 60", 1000),
    "take": (f"'queue1', {EVERYTHING}, 10", 1000),
    "acknowledge": (f"{SETTLED}, 'somebody'", 200),
    "acknowledge_again": (f"{SETTLED}, 'somebody', '{{1,2,3,4,5,6,7,8,9,10}}'", 200),
    "renew": (f"{SETTLED}, 'somebody', 60", 300),
    "still_held": (f"{SETTLED}, 'somebody'", 100),
    "release": (f"{SETTLED}, 'somebody', 1", 300),
    "bury": (f"{SETTLED}, 'somebody', 'why', true", 1200),
    "keep": (f"{SETTLED}, 'somebody', 'why'", 400),
    "disown": ("'queue1', 'nobody', '{1,2,3}', 100", 700),
    "publish": (f"'queue5000', {MESSAGE}, true", 60),
    "publish_routed": (f"'direct', 'key.5000', {MESSAGE}, NULL, 'channel', 0", 150),
    "promote": ("'queue1', 100", 100),
    "next_look": ("'queue1'", 1500),
    "queue_size": ("'empty', 1000", 60),
    "purge": ("'queue1', 10, false", 1500),
    "sweep_messages": ("10", 1200),
    "expired_messages": ("10", 200),
    **{name: (arguments, buffers) for name, arguments, buffers in OF_ONE_QUEUE},
}


@pytest.fixture(scope="module")
def explain(server: Server) -> Iterator[Callable[[str], Plan]]:
    """A function that explains a statement of ours that was prepared before the tables filled."""
    name = server.create_database()
    broker = Broker(options.build(urls.parse(server.url(name), options.NAMES), {}))
    broker.database.acquire()
    broker.close()
    ours = database_module.SETTINGS
    with psycopg.connect(server.url(name), autocommit=True, options=ours) as connection:
        # Each statement as it is: psycopg would deallocate what is prepared after a rollback.
        execute = connection.pgconn.exec_
        for table in TABLES:
            connection.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = off)".encode())
            connection.execute(f"VACUUM ANALYZE {table}".encode())
        for statement in CALLS:
            text = queries.statements("pgnotify")[statement].sql
            connection.execute(f"PREPARE p_{statement} ({TYPES[statement]}) AS ".encode() + text)
        for statement, (arguments, _) in CALLS.items():
            for _ in range(7):
                connection.execute("BEGIN")
                connection.execute(f"EXECUTE p_{statement} ({arguments})".encode())
                execute(b"ROLLBACK")
        fill = FILL.format(queues=QUEUES, leased=LEASED, ready=READY, future=FUTURE)
        execute(fill.encode())
        execute(FILL_TOPOLOGY.format(bindings=BINDINGS, few=FEW).encode())

        def run(statement: str) -> Plan:
            command = f"EXECUTE p_{statement} ({CALLS[statement][0]})"
            execute(b"BEGIN")
            explained = execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT json) {command}".encode())
            execute(b"ROLLBACK")
            return Plan(json.loads(explained.get_value(0, 0) or b"")[0])

        yield run
    server.drop_database(name)


@pytest.mark.parametrize("statement", CALLS)
def test_a_plan_of_empty_tables_serves_full_ones(
    explain: Callable[[str], Plan], statement: str
) -> None:
    plan = explain(statement)
    assert plan.seq_scans <= {"exchanges"}
    # Once by its head of leased rows, where it has no bound.
    head = LEASED / QUEUES if statement in ("take", "next_look", "purge") else 0
    assert plan.rows_read_from("tasks_ready") <= head + 1000
    assert plan.rows_read_from("tasks_pkey") <= 200
    nodes = [(n["Node Type"], n.get("Index Name"), n["Shared Hit Blocks"]) for n in plan.nodes]
    assert plan.buffers < CALLS[statement][1], nodes


def test_sessions_have_these_settings(broker: Broker) -> None:
    with broker.database.session() as session:
        for setting in database_module.SETTINGS.replace("-c ", "").split():
            name, value = setting.split("=")
            assert session.script(f"SHOW {name}")[0][0].decode().replace(", ", ",") == value
