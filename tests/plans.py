"""Tables filled for EXPLAIN, the statements' parameters, and what a plan says."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

READY, FUTURE, LEASED = 50_000, 50_000, 5_000
QUEUES = 4

FILL = """
INSERT INTO pgnotify.tasks (task_name, priority, available_at, lease_worker_id, lease_expiration,
                            deliveries, envelope, payload)
SELECT 'queue' || (n % {queues}), (n % 11 = 0)::int * 5,
       CASE WHEN kind = 'future' THEN now() + interval '1 h' + n * interval '1 s' END,
       CASE WHEN kind = 'leased' THEN 'somebody' END,
       CASE WHEN kind = 'leased' THEN now() + interval '1 h' END,
       (kind = 'leased')::int, '{{}}', 'x'
FROM (VALUES ('leased', 0, {leased}), ('ready', 1, {ready}), ('future', 2, {future}))
         AS kinds (kind, place, count),
     LATERAL generate_series(1, count) AS n
ORDER BY place, n
"""

BINDINGS, FEW, EXPIRING = 6_000, 20, 100

#: A direct, a topic and a fanout exchange among others; `few` is a fanout exchange with FEW queues.
FILL_TOPOLOGY = """
INSERT INTO pgnotify.exchanges
VALUES ('direct', 'direct', true), ('topic', 'topic', true), ('fanout', 'fanout', true),
       ('few', 'fanout', true);
INSERT INTO pgnotify.queues (queue_name, durable, exclusive, auto_delete, arguments, declared_by,
                             message_ttl, expires_at)
SELECT 'queue' || n, n > 10, n <= 10, n <= 10, '{{}}', 'me', n, now() + n * interval '1 h'
FROM generate_series(1, {bindings}) AS n;
INSERT INTO pgnotify.bindings (exchange_name, routing_key, queue_name, pattern)
SELECT exchange, 'key.' || n, 'queue' || n, '^\\.key\\.' || n || '$'
FROM (VALUES ('direct', {bindings}), ('topic', {few}), ('few', {few}), ('fanout', {few}))
         AS exchanges (exchange, count),
     LATERAL generate_series(1, count) AS n;
UPDATE pgnotify.tasks SET expires_at = now() - interval '1 h' WHERE task_id % 1000 = 999;
INSERT INTO pgnotify.broadcasts (envelope, payload)
SELECT '{{}}', 'x' FROM generate_series(1, {bindings});
INSERT INTO pgnotify.dead_letters (task_id, task_name, priority, published_at, attempts, reason,
                                   envelope, payload)
SELECT n, 'queue1', 0, now(), 1, 'rejected', '{{}}', 'x' FROM generate_series(1, {bindings}) AS n
"""

#: The columns of the statements' parameters, for EXPLAIN EXECUTE.
TYPES = {
    "claim": "text, smallint[], bigint[], smallint[], int, text, float8",
    "take": "text, smallint[], bigint[], smallint[], int",
    "acknowledge": "bigint[], int[], text",
    "acknowledge_again": "bigint[], int[], text, float8[]",
    "renew": "bigint[], int[], text, float8",
    "release": "bigint[], int[], text, int",
    "bury": "bigint[], int[], text, text, boolean",
    "still_held": "bigint[], int[], text",
    "keep": "bigint[], int[], text, text",
    "expired_messages": "int",
    "disown": "text, text, bigint[], int",
    "publish": "text, smallint, text, float8, boolean, text, text, bytea, boolean",
    "publish_many": "text[], smallint[], timestamptz[], float8[], boolean, text, text[], bytea[],"
    " boolean[]",
    "publish_routed": "text, text, smallint, text, float8, boolean, text, text, bytea, text, text",
    "broadcast": "bigint",
    "trim": "text",
    "sweep_messages": "int",
    "sweep_dead_letters": "float8, int",
    "bindings_of": "text",
    "go_live": "text, int",
    "end_live": "text",
    "touch": "text[], float8",
    "abandon": "text, text",
    "sweep_queue": "text",
    "has_queue": "text",
    "promote": "text, int",
    "next_look": "text",
    "queue_size": "text, bigint",
    "purge": "text, int",
}

EVERYTHING = "'{-1}', '{0}', '{32767}'"

TABLES = [f"pgnotify.{name}" for name in ("tasks", "queues", "exchanges", "bindings", "broadcasts")]


class Plan:
    """What EXPLAIN (ANALYZE, BUFFERS) says of a statement."""

    def __init__(self, tree: dict[str, Any]) -> None:
        self.tree = tree
        self.nodes = list(self._walk(tree["Plan"]))

    def _walk(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        yield node
        for child in node.get("Plans", ()):
            yield from self._walk(child)

    @property
    def indexes(self) -> set[str]:
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    @property
    def seq_scans(self) -> set[str]:
        scans = [node for node in self.nodes if node["Node Type"] == "Seq Scan"]
        # What is never executed reads nothing.
        return {scan["Relation Name"] for scan in scans if scan["Actual Loops"]}

    @property
    def buffers(self) -> int:
        top = self.tree["Plan"]
        return int(top["Shared Hit Blocks"] + top["Shared Read Blocks"])

    def rows_of(self, table: str) -> float:
        return sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in self.nodes
            if node.get("Relation Name") == table and node["Node Type"] != "ModifyTable"
        )

    def rows_read_from(self, index: str) -> float:
        return sum(
            (node["Actual Rows"] + node.get("Rows Removed by Filter", 0)) * node["Actual Loops"]
            for node in self.nodes
            if node.get("Index Name") == index
        )


MESSAGE = "0::smallint, NULL, NULL, false, 'off', '{}', 'x'"

#: Statements about one queue, and how many pages they may touch.
OF_ONE_QUEUE = [
    ("bindings_of", "'queue5'", 150),
    ("has_queue", "'none'", 60),
    ("go_live", "'queue5', 4", 100),
    ("end_live", "'queue5'", 100),
    ("touch", "'{queue1,queue5,queue5000}', 60", 120),
    ("abandon", "'queue5', 'nobody'", 60),
    ("sweep_queue", "'queue5'", 60),
    ("broadcast", "5000", 10),
    ("sweep_dead_letters", "3600, 100", 300),
]
