"""What was published is what is claimed: byte for byte, character for character."""

from __future__ import annotations

import os
import pickle
import uuid

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from kombu_pgnotify.claims import Ranges
from kombu_pgnotify.errors import StatementFailed
from kombu_pgnotify.messages import Fence, Outgoing
from kombu_pgnotify.store import MessageStore

BODIES = {
    "empty": b"",
    "NUL": b"\0",
    "NUL inside": b"a\0b\0",
    "backslashes": b"\\x00\\\\'\"",
    "hex prefix": b"\\xdeadbeef",
    "all bytes": bytes(range(256)) * 3,
    "emoji": "😀 \U0010ffff".encode(),
    "lone surrogate": "\ud800x\udfff".encode("utf-8", "surrogatepass"),
    "pickle": pickle.dumps({"a": [1, 2.5, None, b"\0"], "b": {1, 2}}, protocol=5),
    "quotes": b"{\"a\": 'b'}, {NULL}",
}

ENVELOPES = {
    "NUL in JSON": '{"a": "\\u0000"}',
    "lone surrogate in JSON": '{"a": "\\ud800"}',
    "NULL": "NULL",
    "array": "{1,2}",
    "empty": "",
    "not ASCII": '{"a": "größe 😀"}',
    "backslashes": '{"a": "\\\\x"}',
}


def through_the_table(
    store: MessageStore, everything: Ranges, envelope: str, payload: bytes
) -> tuple[str, bytes]:
    queue = uuid.uuid4().hex
    task_id = store.publish(queue, Outgoing(envelope, payload))
    (row,) = store.claim(queue, everything, 1, "me")
    assert store.acknowledge([Fence(task_id, row.delivery)]) == {task_id}
    return row.envelope, row.payload


@pytest.mark.parametrize("name", BODIES)
def test_a_payload_keeps_every_byte(name: str, store: MessageStore, everything: Ranges) -> None:
    body = BODIES[name]
    assert through_the_table(store, everything, "{}", body) == ("{}", body)


@pytest.mark.parametrize("name", ENVELOPES)
def test_an_envelope_keeps_every_character(
    name: str, store: MessageStore, everything: Ranges
) -> None:
    text = ENVELOPES[name]
    assert through_the_table(store, everything, text, b"") == (text, b"")


def test_five_megabytes_keep_every_byte(store: MessageStore, everything: Ranges) -> None:
    body = os.urandom(5_000_000)
    envelope = '{"a": "' + "x" * 1_000_000 + '"}'
    found = through_the_table(store, everything, envelope, body)
    # Not compared inside assert: pytest would explain the difference at length.
    same = found == (envelope, body)
    assert same


def test_many_large_rows_come_in_one_claim(store: MessageStore, everything: Ranges) -> None:
    bodies = [os.urandom(300_000) for _ in range(20)]
    for body in bodies:
        store.publish("queue", Outgoing("{}", body))
    rows = store.claim("queue", everything, 20, "me")
    same = [row.payload for row in rows] == bodies
    assert same


def test_random_payloads_and_envelopes_keep_everything(
    store: MessageStore, everything: Ranges
) -> None:
    @settings(
        max_examples=60,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture],
    )
    @given(
        envelope=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0")),
        body=st.binary(max_size=2000),
    )
    def check(envelope: str, body: bytes) -> None:
        assert through_the_table(store, everything, envelope, body) == (envelope, body)

    check()


@pytest.mark.parametrize(
    "queue", ["", "x" * 10_000, "größe 😀", "a'b\"c", "{a,b}", "NULL", "a\\b", " ", "a\nb", "%s"]
)
def test_a_queue_may_have_any_name(queue: str, store: MessageStore, everything: Ranges) -> None:
    if len(queue) > 1000:
        # What is random does not compress: an index row has room for 2,700 bytes.
        queue = "x" * 1000
    task_id = store.publish(queue, Outgoing("{}", b""))
    assert store.size(queue) == 1
    (row,) = store.claim(queue, everything, 1, "me")
    store.release([Fence(row.task_id, row.delivery)], {queue}, started=False)
    assert [row.task_id for row in store.take(queue, everything, 1)] == [task_id]


@pytest.mark.parametrize("queue", ["a\0b", "\0", "lone \ud800"])
def test_a_queue_name_that_postgres_cannot_keep_is_refused(
    queue: str, store: MessageStore, everything: Ranges
) -> None:
    with pytest.raises(StatementFailed):
        store.publish(queue, Outgoing("{}", b""))
    with pytest.raises(StatementFailed):
        store.claim(queue, everything, 1, "me")
    with pytest.raises(StatementFailed):
        store.size(queue)
    assert store.size(queue.partition("\0")[0].replace("\ud800", "")) == 0
    assert store.publish("good", Outgoing("{}", b"")) >= 1, "the store still works"


def test_a_queue_name_too_long_for_an_index_is_refused_and_not_cut(store: MessageStore) -> None:
    # What is random does not compress.
    queue = os.urandom(10_000).hex()
    with pytest.raises(StatementFailed):
        store.publish(queue, Outgoing("{}", b""))
    assert store.size(queue) == 0


@pytest.mark.parametrize("prepared", [True, False])
def test_statements_work_prepared_or_not(
    prepared: bool, make_broker: object, everything: Ranges
) -> None:
    store: MessageStore = make_broker(prepared_statements=prepared).store  # type: ignore[operator]
    for _ in range(3):
        assert through_the_table(store, everything, "{}", b"\0") == ("{}", b"\0")
    assert store.next_look("queue") is None
    assert store.promote("queue") == 0
    assert store.purge("queue") == 0
