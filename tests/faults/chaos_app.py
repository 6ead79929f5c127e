"""The Celery application of the chaos: its tasks only record that they ran.

Used by the workers, by the producers and, for its last probes, by the harness itself.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from typing import Any

from celery import Celery, Task, signals
from celery.utils.nodenames import WORKER_DIRECT_EXCHANGE
from chaos_records import Recorder

from kombu_pgnotify.channel import Message

OPTIONS = "CHAOS_OPTIONS"  # the environment's name of broker_transport_options, in JSON
HOST = "chaos"  # after the @ of the workers' node names

#: kombu's retries of one publish: longer than a restart, shorter than a long freeze.
RETRIES = {"max_retries": 8, "interval_start": 0.05, "interval_step": 0.2, "interval_max": 0.5}

app = Celery("chaos")
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=json.loads(os.environ.get(OPTIONS, "{}")),
    # So that what killed workers leave behind has expired by the end.
    control_queue_expires=10,
    event_queue_expires=10,
    task_ignore_result=True,
    # Celery's default acknowledges a late task when its pool process was killed: it is lost then.
    task_reject_on_worker_lost=True,
    worker_direct=True,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=2,
)

recorder = Recorder()
_runs = itertools.count(1)


@signals.task_received.connect
def _note_received(request: Any, **_: Any) -> None:
    recorder.note("received", request.id, tag=request.message.delivery_tag)


def _note_acks() -> None:
    """Record when a message is acknowledged at last: Celery's loops do it when they come round.

    By the class, since a reference from a message to itself would keep what Celery drops.
    """
    ack = Message.ack

    def noting_ack(self: Message, multiple: bool = False) -> None:
        ack(self, multiple)
        if "id" in self.headers:
            recorder.note("acked", self.headers["id"], tag=self.delivery_tag)

    Message.ack = noting_ack


_note_acks()


def _run(task: Task, seconds: float) -> None:
    request, run = task.request, next(_runs)
    tag = request.properties["delivery_tag"]
    redelivered = bool(request.delivery_info.get("redelivered"))
    recorder.note("start", request.id, tag=tag, run=run, redelivered=redelivered)
    time.sleep(seconds)
    recorder.note("end", request.id, run=run)


@app.task(bind=True)
def early(self: Task, seconds: float) -> None:
    """Take some time; acknowledged before."""
    _run(self, seconds)


@app.task(bind=True, acks_late=True)
def late(self: Task, seconds: float) -> None:
    """Take some time; acknowledged afterwards."""
    _run(self, seconds)


@app.task(bind=True, acks_late=True)
def relay(self: Task, seconds: float) -> None:
    """Publish another task, from wherever the pool runs this one."""
    publish(late, f"{self.request.id}-{os.environ['CHAOS_ROLE']}-{os.getpid()}-{next(_runs)}")
    _run(self, seconds)


def publish(task: Task, label: str, seconds: float = 0.0, **options: Any) -> bool:
    """Publish a task and record whether that was accepted; False if it raised.

    A task is in doubt once kombu has to repeat something: the first attempt may have been carried
    out all the same.
    """

    def doubt(exc: BaseException, _interval: float = 0.0) -> None:
        why = str(exc).partition("\n")[0][:200] or type(exc).__name__
        recorder.note("doubtful", label, why=why)

    recorder.note("sending", label, late=task.acks_late, options=sorted(options), seconds=seconds)
    try:
        policy = {**RETRIES, "errback": doubt}
        task.apply_async((seconds,), task_id=label, retry=True, retry_policy=policy, **options)
    except Exception as exc:
        doubt(exc)
        return False
    recorder.note("accepted", label)
    return True


def directly_to(worker: str) -> dict[str, str]:
    """Return the options of a publish to one worker's own queue (worker_direct)."""
    return {"exchange": WORKER_DIRECT_EXCHANGE.name, "routing_key": f"{worker}@{HOST}"}
