"""Live queues: told by NOTIFY and not by rows, with nothing lost and nothing doubled on the way."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from fix_proxy import Proxy
from helpers import wait_until

from kombu_pgnotify import sql as queries
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.consumers import Consumer
from kombu_pgnotify.consumption import Consumption
from kombu_pgnotify.leases import Lease
from kombu_pgnotify.messages import Claimed, Outgoing, exchange_channel_of
from kombu_pgnotify.qos import QoS, flush
from kombu_pgnotify.topology import Queue
from kombu_pgnotify.waker import Waker

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

PATIENCE = 20.0

LIVE = "SELECT queue_name FROM pgnotify.queues WHERE live ORDER BY queue_name"


class Reader:
    """One connection's consumers, who do not acknowledge; keeps what they get."""

    def __init__(self, broker: Broker) -> None:
        self.broker = broker
        self.got: list[tuple[str, bytes]] = []
        self._waker = Waker()
        # Without a prefetch limit: it takes all there is.
        qos = QoS(None, lambda: broker.keeper, flush, lambda: None)  # type: ignore[arg-type]
        self._credit = lambda: qos
        self._consumption = Consumption(broker, self._waker.wake)

    @property
    def bodies(self) -> list[bytes]:
        return [body for _, body in self.got]

    def consume(self, queue: str) -> Consumer:
        def deliver(row: Claimed, lease: Lease | None) -> None:
            self.got.append((queue, row.payload))

        consumer = Consumer(queue, True, self._credit, deliver)
        self._consumption.add(consumer)
        return consumer

    def cancel(self, consumer: Consumer) -> None:
        self._consumption.cancel(consumer)

    def read_until(self, condition: Callable[[], Any]) -> None:
        deadline = monotonic() + PATIENCE
        while not condition():
            assert monotonic() < deadline, f"only {len(self.got)} came: {self.got[-3:]}"
            if not self._consumption.deliver_one(one_by_one=True):
                look = self._consumption.next_look()
                self._waker.wait(0.05 if look is None else min(look, 0.05))

    def read(self, count: int) -> list[bytes]:
        """Return what has come, once there are that many."""
        self.read_until(lambda: len(self.got) >= count)
        return self.bodies

    def close(self) -> None:
        self._consumption.close()
        self._waker.close()


@pytest.fixture
def make_reader(make_broker: MakeBroker) -> Iterator[Callable[..., Reader]]:
    """A function that makes a reader with a broker of its own: another process, so to say."""
    readers: list[Reader] = []

    def make(**options: Any) -> Reader:
        readers.append(Reader(make_broker(**options)))
        return readers[-1]

    yield make
    for reader in readers:
        reader.close()


@pytest.fixture
def reader(make_reader: Callable[..., Reader]) -> Reader:
    return make_reader()


@pytest.fixture
def live(sql: Sql) -> Callable[[], list[str]]:
    """A function that says which queues are live."""
    return lambda: [row[0] for row in sql(LIVE)]


def declare(
    broker: Broker, queue: str, *bindings: tuple[str, str], kind: str = "fanout", **options: Any
) -> None:
    """Declare a consumer's own queue, its exchanges and `(exchange, key)` bindings."""
    arguments = options.pop("arguments", None)
    flags = {"durable": False, "exclusive": True, "auto_delete": True, **options}
    broker.housekeeper.declare(Queue.declared(queue, arguments, **flags))
    for name, key in bindings:
        broker.topology.declare_exchange(name, kind, durable=False)
        assert broker.topology.bind(queue, name, key) == (True, True)
        broker.housekeeper.bound(queue, name, key)


def start(reader: Reader, queue: str, live: Callable[[], list[str]]) -> Consumer:
    """Consume from a queue, and read until it is live and nothing is in rows any more."""
    consumer = reader.consume(queue)
    reader.read_until(lambda: queue in live())
    settle(reader, queue)
    return consumer


def settle(reader: Reader, queue: str) -> None:
    """Read what is there, rows and what was told."""
    reader.broker.store.publish(queue, Outgoing("{}", b"settled"))
    reader.read_until(lambda: b"settled" in reader.bodies)
    reader.got.remove((queue, b"settled"))


def tell(broker: Broker, *bodies: bytes, exchange: str = "x", key: str = "") -> None:
    for body in bodies:
        broker.store.publish_routed(exchange, key, Outgoing("{}", body))


# -- told, not written


def test_what_a_live_queue_is_told_is_never_a_row(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    sent = [b"", b"\0", b"text", "größe".encode(), bytes(range(256)), b"x" * 5000]
    tell(broker, *sent)
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]
    assert sql("SELECT count(*) FROM pgnotify.broadcasts") == [(0,)]
    assert reader.read(len(sent)) == sent


def test_what_is_too_big_is_one_row_for_all(
    broker: Broker, make_reader: Callable[..., Reader], live: Callable[[], list[str]], sql: Sql
) -> None:
    readers = [make_reader() for _ in range(3)]
    for n, reader in enumerate(readers):
        declare(reader.broker, f"queue{n}", ("x", ""))
        start(reader, f"queue{n}", live)
    big = random.Random(1).randbytes(300_000)
    tell(broker, big)
    assert sql("SELECT count(*) FROM pgnotify.broadcasts") == [(1,)]
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]
    for reader in readers:
        same = reader.read(1) == [big]
        assert same


def test_nothing_is_written_for_nobody(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql
) -> None:
    declare(reader.broker, "queue", ("x", "k"), kind="topic")
    start(reader, "queue", live)
    tell(broker, b"x", b"x" * 100_000, key="other")
    tell(broker, b"x", b"x" * 100_000, exchange="nothing")
    for table in ("tasks", "broadcasts"):
        assert sql(f"SELECT count(*) FROM pgnotify.{table}") == [(0,)]


@pytest.mark.parametrize("byte", [b"x", b"\xff", b"\0"])
def test_a_message_of_any_size_fits_somehow(
    byte: bytes, broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    key = "größe😀" * 10
    declare(reader.broker, "queue", ("x", key))
    start(reader, "queue", live)
    # Around where it no longer fits as text, as base64, and as base64 beside the heading.
    sizes = [*range(7700, 7960, 9), *range(5760, 5960, 7), 10_000]
    tell(broker, *(byte * size for size in sizes), key=key)
    assert [len(body) for body in reader.read(len(sizes))] == sizes


def test_more_binding_keys_than_a_notice_takes_mean_a_row(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql
) -> None:
    declare(reader.broker, "queue", *(("x", "k" * 200 + str(n)) for n in range(50)))
    start(reader, "queue", live)
    tell(broker, b"one", b"two")
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(2,)]
    assert reader.read(2) == [b"one", b"two"]


def test_equal_messages_of_one_transaction_are_as_many_as_were_sent(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    same = ("x", "", Outgoing("{}", b"same"))
    broker.store.publish_batch([same, same, ("x", "", Outgoing("{}", b"other")), same])
    tell(broker, b"end")
    reader.read_until(lambda: b"end" in reader.bodies)
    assert reader.bodies == [b"same", b"same", b"other", b"same", b"end"]


def test_what_has_outlived_its_time_is_not_delivered(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    broker.store.publish_routed("x", "", Outgoing("{}", b"old", ttl=0))
    broker.store.publish_routed("x", "", Outgoing("{}", b"new", ttl=60))
    assert reader.read(1) == [b"new"]
    declare(reader.broker, "short", ("y", ""), arguments={"x-message-ttl": 0})
    reader.consume("short")
    reader.read_until(lambda: live() == ["queue", "short"])
    tell(broker, b"too late", exchange="y")
    tell(broker, b"end")
    reader.read_until(lambda: b"end" in reader.bodies)
    # What was told first was heard first.
    assert reader.got == [("queue", b"new"), ("queue", b"end")]


# -- who goes live


def test_a_queue_goes_live_when_its_consumer_listens_and_not_before(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    tell(broker, b"before")
    assert live() == []
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(1,)]
    start(reader, "queue", live)
    assert reader.bodies == [b"before"]


@pytest.mark.parametrize(
    "options",
    [{"exclusive": False}, {"auto_delete": False}, {"durable": True}],
    ids=["shared", "lasting", "durable"],
)
def test_a_queue_that_is_not_one_consumers_own_and_passing_gets_rows(
    options: dict[str, bool], broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", ""), **options)
    reader.consume("queue")
    for n in range(5):
        tell(broker, b"%d" % n)
        reader.read(n + 1)
        assert live() == []
    assert reader.bodies == [b"0", b"1", b"2", b"3", b"4"]


def test_a_queue_of_direct_exchanges_gets_rows(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", "k"), kind="direct")
    reader.consume("queue")
    tell(broker, b"a", b"b", key="k")
    assert reader.read(2) == [b"a", b"b"]
    assert live() == []


def test_without_notify_all_comes_as_rows(
    broker: Broker, make_reader: Callable[..., Reader], live: Callable[[], list[str]]
) -> None:
    reader = make_reader(notify=False, polling_interval=0.02)
    declare(reader.broker, "queue", ("x", ""))
    reader.consume("queue")
    sent = [b"%d" % n for n in range(20)]
    tell(broker, *sent)
    assert reader.read(20) == sent
    assert live() == []


def test_who_publishes_without_notify_still_tells_live_queues(
    make_broker: MakeBroker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    tell(make_broker(notify=False), b"told")
    assert reader.read(1) == [b"told"]


def test_each_of_several_queues_on_one_exchange_goes_live(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    for n in range(3):
        declare(reader.broker, f"queue{n}", ("x", ""))
        start(reader, f"queue{n}", live)
    tell(broker, b"all")
    reader.read(3)
    assert sorted(reader.got) == [(f"queue{n}", b"all") for n in range(3)]


def test_a_queue_that_is_consumed_from_again_goes_live_again(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "other", ("x", ""))
    start(reader, "other", live)
    for n in range(3):
        declare(reader.broker, "queue", ("x", ""))
        consumer = start(reader, "queue", live)
        tell(broker, b"%d" % n)
        reader.read_until(lambda: ("queue", b"%d" % n) in reader.got)  # noqa: B023
        reader.cancel(consumer)
        wait_until(lambda: not broker.topology.has_queue("queue"))
    reader.read_until(lambda: len(reader.got) == 6)
    assert Counter(reader.bodies) == {b"0": 2, b"1": 2, b"2": 2}


def test_a_queue_that_is_consumed_from_again_is_not_live_before_its_exchange_is_heard_again(
    broker: Broker, make_reader: Callable[..., Reader], proxy: Proxy, database_name: str,
    live: Callable[[], list[str]], sql: Sql,
) -> None:  # fmt: skip
    reader = make_reader(listen_url=proxy.url(database_name), polling_interval=0.02)
    declare(reader.broker, "queue", ("x", ""))
    reader.cancel(start(reader, "queue", live))
    wait_until(lambda: not broker.topology.has_queue("queue"))
    # Behind it, it may have told all of what it was named for and has not looked for any more.
    unlistened = (
        "SELECT 1 FROM pg_stat_activity WHERE pid <> pg_backend_pid()"
        " AND query ~ 'UNLISTEN.*pgnotify_x_|^SELECT pg_notify.[$]1, [$]2.$'"
    )
    listener = reader.broker.listener
    wait_until(lambda: "_x_" not in str(list(listener._heard.values())))
    wait_until(lambda: sql(unlistened))
    proxy.freeze()
    declare(reader.broker, "queue", ("x", ""))
    reader.consume("queue")
    tell(broker, b"one")
    assert reader.read(1) == [b"one"]
    tell(broker, b"two")
    assert reader.read(2) == [b"one", b"two"]
    assert live() == []
    proxy.thaw()
    reader.read_until(lambda: live() == ["queue"])
    tell(broker, b"three")
    assert reader.read(3) == [b"one", b"two", b"three"]


def test_one_that_is_live_and_one_that_is_not_yet_get_each_message_once(
    broker: Broker, make_reader: Callable[..., Reader], live: Callable[[], list[str]]
) -> None:
    one, two = make_reader(), make_reader()
    declare(one.broker, "one", ("x", ""))
    declare(two.broker, "two", ("x", ""))
    start(one, "one", live)
    tell(broker, b"row for two")
    two.consume("two")
    two.read_until(lambda: live() == ["one", "two"])
    tell(broker, b"told")
    assert one.read(2) == [b"row for two", b"told"]
    settle(two, "two")
    assert two.read(2) == [b"row for two", b"told"]


# -- the way between rows and notices


class Publisher:
    """Publishes numbered messages from a thread of its own; knows which were sent to anybody."""

    def __init__(self, broker: Broker, name: str, keys: tuple[str, ...] = ("",)) -> None:
        self.sent: list[bytes] = []
        self._broker = broker
        self._name = name
        self._keys = keys
        self._random = random.Random(name)

    def publish(self, count: int, sizes: tuple[int, ...], pause: float = 0.001) -> None:
        wait = threading.Event()
        for n in range(count):
            body = b"%s %d " % (self._name.encode(), n)
            body += self._random.randbytes(self._random.choice(sizes))
            key = self._keys[n % len(self._keys)]
            routed = self._broker.store.publish_routed("x", key, Outgoing("{}", body))
            assert len(routed.queues) + routed.live <= 1
            if routed.queues or routed.live:
                self.sent.append(body)
            wait.wait(self._random.uniform(0, 2 * pause))


SIZES = (0, 0, 10, 100, 3000, 6000, 7900, 20_000, 200_000)


@pytest.mark.parametrize("kind", ["fanout", "topic"])
def test_nothing_is_lost_doubled_or_out_of_order_while_a_queue_goes_live(
    kind: str, make_broker: MakeBroker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", "#"), kind=kind)
    publishers = [Publisher(make_broker(), name, ("", "a.b")) for name in ("one", "two")]
    with ThreadPoolExecutor(2) as pool:
        work = [pool.submit(publisher.publish, 150, SIZES) for publisher in publishers]
        # Some are there when the consumer comes.
        wait_until(lambda: len(publishers[0].sent) > 20)
        reader.consume("queue")
        reader.read_until(lambda: all(done.done() for done in work))
        assert [done.result() for done in work] == [None] * 2
    publishers[0].publish(1, (5_000_000,))
    assert live() == ["queue"]
    sent = [body for publisher in publishers for body in publisher.sent]
    reader.read(len(sent))
    settle(reader, "queue")
    for publisher in publishers:
        name = publisher._name.encode()
        same = [body for body in reader.bodies if body.startswith(name)] == publisher.sent
        assert same, name
    assert len(reader.got) == len(sent)


def test_nothing_is_lost_or_doubled_while_a_queue_is_bound_to_more_and_more(
    make_broker: MakeBroker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    keys = tuple(f"key{n}" for n in range(20))
    declare(reader.broker, "queue", ("x", keys[0]), kind="topic")
    publishers = [Publisher(make_broker(), name, keys) for name in ("one", "two")]
    binder = make_broker().topology

    def bind() -> None:
        for key in keys[1:]:
            binder.bind("queue", "x", key)
            threading.Event().wait(0.01)

    with ThreadPoolExecutor(3) as pool:
        work = [pool.submit(publisher.publish, 200, SIZES[:6]) for publisher in publishers]
        work.append(pool.submit(bind))
        reader.consume("queue")
        reader.read_until(lambda: all(done.done() for done in work))
        assert [done.result() for done in work] == [None] * 3
    reader.read_until(lambda: live() == ["queue"])
    settle(reader, "queue")
    sent = Counter(body for publisher in publishers for body in publisher.sent)
    got = Counter(reader.bodies)
    assert len(sent) >= 2 * 200 / len(keys)
    assert (len(sent - got), len(got - sent)) == (0, 0)


def test_rows_from_before_come_before_what_is_told(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    tell(broker, *(b"%d" % n for n in range(10)))
    reader.consume("queue")
    # It may be live before it has read them all.
    reader.read_until(lambda: live() == ["queue"])
    tell(broker, *(b"%d" % n for n in range(10, 20)))
    assert reader.read(20) == [b"%d" % n for n in range(20)]


def test_a_queue_bound_to_more_is_told_again_and_misses_nothing(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    for n in range(3):
        tell(broker, b"%d told" % n)
        broker.topology.declare_exchange(f"y{n}", "fanout", durable=False)
        broker.topology.bind("queue", f"y{n}", "")
        # Not live until its consumer has learnt of that.
        assert live() == []
        tell(broker, b"%d row" % n)
        tell(broker, b"%d new" % n, exchange=f"y{n}")
        reader.read_until(lambda: live() == ["queue"])
    reader.read(9)
    settle(reader, "queue")
    assert sorted(reader.bodies) == sorted(
        b"%d %s" % (n, what) for n in range(3) for what in (b"told", b"row", b"new")
    )


def test_a_queue_declared_anew_while_it_is_live_misses_nothing(
    broker: Broker, reader: Reader, live: Callable[[], list[str]]
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    for n in range(5):
        tell(broker, b"%d told" % n)
        declare(reader.broker, "queue", ("x", ""))
        tell(broker, b"%d after" % n)
    reader.read(10)
    settle(reader, "queue")
    assert sorted(reader.bodies) == sorted(
        b"%d %s" % (n, what) for n in range(5) for what in (b"told", b"after")
    )


def test_a_binding_made_while_it_goes_live_is_not_overlooked(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql
) -> None:
    """The binding is committed after the consumer has looked which there are."""
    declare(reader.broker, "queue", ("x", ""))
    broker.topology.declare_exchange("y", "fanout", durable=False)
    bind = queries.statements("pgnotify")["bind"]
    done = threading.Event()
    with broker.database.session() as session, ThreadPoolExecutor(1) as pool:
        session.script("BEGIN")
        session.run((bind, ("queue", "y", "", "^$")))
        reader.consume("queue")
        reading = pool.submit(reader.read_until, done.is_set)
        # It is live already, or waits for us.
        waiting = "SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: live() or sql(waiting))
        session.script("COMMIT")
        wait_until(lambda: live() == ["queue"])
        tell(broker, b"by the first")
        tell(broker, b"by the second", exchange="y")
        wait_until(lambda: len(reader.got) == 2 or reading.done(), 5)
        done.set()
        reading.result(PATIENCE)
    assert sorted(reader.bodies) == [b"by the first", b"by the second"]


def test_what_is_unbound_is_not_heard_although_others_still_are_told(
    broker: Broker, make_reader: Callable[..., Reader], live: Callable[[], list[str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    one, two = make_reader(), make_reader()
    declare(one.broker, "one", ("x", "a"), ("x", "b"), kind="topic")
    declare(two.broker, "two", ("x", "a"), kind="topic")
    start(one, "one", live)
    start(two, "two", live)
    told: list[str] = []
    monkeypatch.setattr(broker.topology, "announce_bound", told.append)
    broker.topology.unbind("one", "x", "a")
    assert told == ["one"], "its consumer is told"
    tell(broker, b"for two", key="a")
    tell(broker, b"for one", key="b")
    one.read_until(lambda: b"for one" in one.bodies)
    assert two.read(1) == [b"for two"]
    settle(one, "one")
    assert one.bodies == [b"for one"]


def test_many_publishers_and_queues_at_once_lose_and_double_nothing(
    make_broker: MakeBroker, make_reader: Callable[..., Reader]
) -> None:
    """Queues come and are live at different times; each gets all from its binding on."""
    sender, count = make_broker(), 120
    sender.topology.declare_exchange("x", "fanout", durable=False)
    readers = [make_reader() for _ in range(4)]
    sent = threading.Event()

    def publish() -> None:
        wait = threading.Event()
        for n in range(count):
            tell(sender, b"%d" % n)
            wait.wait(0.003)
        tell(sender, b"end")
        sent.set()

    def read(number: int) -> list[bytes]:
        reader = readers[number]
        threading.Event().wait(0.05 * number)
        declare(reader.broker, f"queue{number}", ("x", ""))
        reader.consume(f"queue{number}")
        reader.read_until(lambda: b"end" in reader.bodies)
        return reader.bodies

    with ThreadPoolExecutor(5) as pool:
        publishing = pool.submit(publish)
        found = list(pool.map(read, range(4)))
        publishing.result(PATIENCE)
    for bodies in found:
        first = int(bodies[0])
        assert bodies == [*(b"%d" % n for n in range(first, count)), b"end"]


# -- trouble


GOOD = '{"keys": ["k"], "not": [], "ttl": null}'
FORGED = [
    "", "\n", "x", "{", "null", "[]", "1", '"keys"', "{}", "published", "bound", "released", GOOD,
    f"{GOOD}\n", f"{GOOD}\n{{}}\nx", f"{GOOD}\n#", f"{GOOD}\n#x", f"{GOOD}\n#999", f"{GOOD}\n#-1",
    f"{GOOD}\n#" + "9" * 30, f"{GOOD}\n{{}}\nb!", "[" * 7000,
    '{"keys": ["k"], "not": [], "ttl": 1' + "0" * 400 + "}\n{}\nt",
    '{"keys": ["k"], "not": [], "ttl": NaN}\n{}\nt',
    '{"keys": ["k"], "not": [], "ttl": "x"}\n{}\nt',
    '{"keys": ["k"], "not": null, "ttl": null}\n{}\nt',
    '{"keys": [[]], "not": [], "ttl": null}\n{}\nt',
    '{"keys": 1, "not": [], "ttl": null}\n{}\nt',
]  # fmt: skip


def test_a_forged_notice_is_passed_over(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    declare(reader.broker, "queue", ("x", "k"))
    start(reader, "queue", live)
    for n, payload in enumerate(FORGED):
        sql("SELECT pg_notify(%s, %s)", exchange_channel_of("pgnotify", "x"), payload)
        tell(broker, b"%d" % n)
    assert reader.read(len(FORGED)) == [b"%d" % n for n in range(len(FORGED))]
    assert "notice.garbage" in caplog.text
    assert live() == ["queue"]


def test_a_message_that_is_gone_already_is_passed_over(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    tell(broker, b"x" * 100_000)
    sql("DELETE FROM pgnotify.broadcasts")
    tell(broker, b"next")
    assert reader.read(1) == [b"next"]
    assert "broadcast.gone" in caplog.text


def test_a_lost_listen_connection_is_replaced_and_the_queue_hears_again(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    sql(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND query LIKE 'LISTEN%'"
    )

    def heard() -> bool:
        tell(broker, b"again")
        return bool(reader.got)

    reader.read_until(heard)


def test_a_queue_goes_with_its_consumer_and_is_told_nothing_more(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], sql: Sql
) -> None:
    declare(reader.broker, "queue", ("x", ""))
    consumer = start(reader, "queue", live)
    reader.cancel(consumer)
    wait_until(lambda: not broker.topology.has_queue("queue"))
    assert broker.topology.bindings() == []
    found = broker.store.publish_routed("x", "", Outgoing("{}", b"x" * 100_000))
    assert (found.queues, found.live) == ([], 0)
    for table in ("tasks", "broadcasts", "queues"):
        assert sql(f"SELECT count(*) FROM pgnotify.{table}") == [(0,)]


def test_a_consumer_that_is_behind_gets_the_latest(
    broker: Broker, reader: Reader, live: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kombu_pgnotify.live.MAILBOX", 100)
    declare(reader.broker, "queue", ("x", ""))
    start(reader, "queue", live)
    tell(broker, *(b"%d" % n for n in range(300)))
    reader.read_until(lambda: reader.bodies[-1:] == [b"299"])
    # How many there was room for depends on when they were heard.
    numbers = [int(body) for body in reader.bodies]
    assert numbers == sorted(set(numbers))
    assert len(numbers) > 50
