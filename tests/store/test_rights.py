"""The README's grants suffice for who publishes, consumes or looks, and none is too much."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.errors import ConfigurationError, PgnotifyError
from kombu_pgnotify.messages import Fence, Outgoing
from kombu_pgnotify.topology import Queue

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

README = Path(__file__).parents[2] / "README.rst"
MESSAGE = Outgoing("{}", b"")
EVERYTHING = ClaimCursor().next_ranges(0)


class Right(NamedTuple):
    """One privilege of one role on one object, or on one column of it."""

    role: str
    privilege: str
    what: str

    def statement(self, verb: str, role: str) -> str:
        to = "TO" if verb == "GRANT" else "FROM"
        return f"{verb} {self.privilege} ON {self.what} {to} {role}"


def rights_of_the_readme() -> list[Right]:
    text = README.read_text(encoding="utf-8").partition("\nRights\n")[2]
    block = re.search(r"code-block:: sql\n\n((?:    .*\n|\n)+)", text)
    assert block
    found = []
    for statement in re.sub(r"--.*", "", block[1]).split(";")[:-1]:
        match = re.fullmatch(r"GRANT (.+) ON (.+) TO (.+)", " ".join(statement.split()))
        assert match, statement
        for privilege, _, columns in re.findall(r"([A-Z]+)( \(([^)]+)\))?", match[1]):
            for column in columns.split(", "):
                for what in match[2].split(", "):
                    for role in match[3].split(", "):
                        one = f"{privilege} ({column})" if column else privilege
                        found.append(Right(role, one, what))
    return found


RIGHTS = rights_of_the_readme()


def declare(broker: Broker) -> None:
    broker.topology.declare_exchange("x", "topic", durable=True)
    for name in ("grave", "queue"):
        arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "grave"}
        declared = Queue.declared(name, arguments if name == "queue" else None)
        broker.housekeeper.declare(declared)
    broker.topology.bind("queue", "x", "#")


def publish(broker: Broker) -> None:
    declare(broker)
    assert broker.topology.exchange_type("x") == "topic"
    assert broker.topology.has_queue("queue")
    assert broker.store.publish("queue", MESSAGE)
    assert broker.store.publish_routed("x", "key", MESSAGE).queues == ["queue"]
    assert len(broker.store.publish_batch([("", "queue", MESSAGE), ("x", "key", MESSAGE)])) == 2
    assert broker.store.size("queue") >= 4


def consume(broker: Broker) -> None:
    """What a worker does, and what it clears away for all."""
    store, topology = broker.store, broker.topology
    publish(broker)
    fences, published = [], []
    for queue in ("queue", "kept"):
        store.publish(queue, MESSAGE)
        rows = store.claim(queue, EVERYTHING, 3, broker.worker)
        fences += [Fence(row.task_id, row.delivery) for row in rows]
        published += [row.published for row in rows]
    assert len(fences) == 4
    assert len(store.renew(fences)) == 4
    store.run_with_acks(fences[:1], None, (broker.database.statements["ping"], ()))
    assert len(store.release(fences[1:2], {"queue"}, started=True)) == 1
    assert len(store.dead_letter(fences[2:], "rejected")) == 2
    assert store.acknowledge_again(fences, published, broker.worker) == {fences[1].task_id}
    assert store.disown("queue", broker.worker, []) == 0
    assert store.take("queue", EVERYTHING, 1)
    assert store.promote("queue") == 0
    store.next_look("queue")
    assert store.broadcast(1) is None
    topology.touch(["queue"])
    topology.bindings_of("queue")
    topology.go_live("queue", 1)
    topology.abandon("queue", "nobody")
    topology.claim_chore(0)
    broker.housekeeper.sweep()
    topology.unbind("queue", "x", "#")
    topology.delete_queue("queue")
    topology.delete_exchange("x")
    for queue in ("queue", "grave", "kept"):
        store.purge(queue)


def look(broker: Broker) -> None:
    assert broker.topology.exchanges()
    assert broker.topology.bindings() == [("queue", "x", "#")]
    assert broker.topology.has_queue("queue")
    assert broker.store.size("queue") == 0
    with broker.database.session() as session:
        for table in ("tasks", "dead_letters"):
            columns = [
                right.privilege.partition("(")[2].rstrip(")")
                for right in RIGHTS
                if right.role == "monitor" and right.what == f"pgnotify.{table}"
            ]
            calls = f"SELECT {', '.join(columns)} FROM pgnotify.{table}"
            with broker.database.mapped_errors():
                session.script(calls)


WORK: dict[str, Callable[[Broker], None]] = {
    "producer": publish,
    "worker": consume,
    "monitor": look,
}


@pytest.fixture
def work(make_broker: MakeBroker, role_url: str, sql: Sql) -> Callable[[str], None]:
    """A function that does what a role of the README does, in a new process, so to say."""
    owner = make_broker()

    def run(name: str) -> None:
        sql("TRUNCATE pgnotify.tasks, pgnotify.queues CASCADE")
        declare(owner)
        # Not prepared, since a plan that is kept does not ask again for the schema.
        broker = make_broker(role_url, acquire=False, prepared_statements=False)
        try:
            broker.database.acquire()
            WORK[name](broker)
        finally:
            broker.close()

    return run


@pytest.mark.parametrize("name", WORK)
def test_what_the_readme_grants_suffices_and_each_right_is_needed(
    name: str, work: Callable[[str], None], role: str, sql: Sql
) -> None:
    rights = [right for right in RIGHTS if right.role == name]
    for right in rights:
        sql(right.statement("GRANT", role))
    work(name)
    for right in rights:
        sql(right.statement("REVOKE", role))
        with pytest.raises(PgnotifyError):
            work(name)
            pytest.fail(f"not needed: {right}")
        sql(right.statement("GRANT", role))
    work(name)


FORBIDDEN = {
    "producer": [
        "SELECT payload FROM pgnotify.tasks",
        "DELETE FROM pgnotify.tasks",
        "UPDATE pgnotify.tasks SET lease_worker_id = NULL",
        "SELECT payload FROM pgnotify.broadcasts",
        "SELECT FROM pgnotify.dead_letters",
        "DELETE FROM pgnotify.queues",
    ],
    "monitor": [
        "SELECT payload FROM pgnotify.tasks",
        "SELECT envelope FROM pgnotify.dead_letters",
        "SELECT payload FROM pgnotify.broadcasts",
        "UPDATE pgnotify.queues SET live = true",
        "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES ('', '', '')",
    ],
}


@pytest.mark.parametrize("name", FORBIDDEN)
def test_who_only_publishes_or_looks_can_do_no_more(
    name: str, make_broker: MakeBroker, role: str, role_url: str, sql: Sql
) -> None:
    make_broker()
    for right in RIGHTS:
        if right.role == name:
            sql(right.statement("GRANT", role))
    broker = make_broker(role_url)
    for forbidden in FORBIDDEN[name]:
        with (
            pytest.raises(PgnotifyError, match="right is missing"),
            broker.database.session() as session,
        ):
            session.script(forbidden)
            pytest.fail(forbidden)


def test_who_may_not_drop_what_is_too_much_has_published_all_the_same(
    make_broker: MakeBroker, role: str, role_url: str, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    """An error would say that the message was not written, and have it sent again."""
    owner = make_broker()
    owner.topology.declare_queue(Queue.declared("queue", {"x-max-length": 1}), "me")
    for right in RIGHTS:
        if right.role == "producer":
            sql(right.statement("GRANT", role))
    producer = make_broker(role_url).store
    for _ in range(3):
        assert producer.publish("queue", MESSAGE)
    assert "trim.failed" in caplog.text
    assert owner.store.size("queue") == 3
    owner.store.publish("queue", MESSAGE)
    assert owner.store.size("queue") == 1


@pytest.mark.parametrize("granted", range(2))
def test_a_role_that_may_not_read_the_schema_is_told_which_grants_it_needs(
    granted: int, make_broker: MakeBroker, role_url: str, role: str, sql: Sql
) -> None:
    make_broker()
    for right in RIGHTS[:granted]:
        sql(right.statement("GRANT", role))
    with pytest.raises(ConfigurationError) as error:
        make_broker(role_url)
    text = str(error.value)
    assert repr(role) in text
    remedy = text.partition("GRANT")[1] + text.partition("GRANT")[2]
    for statement in remedy.split(";"):
        sql(statement)
    make_broker(role_url)
