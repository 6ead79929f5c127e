"""Inside a Celery worker: what Celery itself does only for brokers that it knows by name."""

from __future__ import annotations

import sys
import time
from typing import Any

#: Seconds that a time limit may have: more than any timer bears.
_LONGEST_LIMIT = 2**31

#: Worker steps that keep a list of the brokers they trust with fanout (class attributes,
#: celery/worker/consumer/mingle.py and gossip.py).
_STEPS = (
    ("celery.worker.consumer.mingle", "Mingle"),
    ("celery.worker.consumer.gossip", "Gossip"),
)


def introduce(driver_type: str) -> None:
    """Put our name on the lists of the worker steps that are loaded.

    Cheap, and safe to repeat: a worker asks every Transport it makes for its name just
    before it looks into the lists.
    """
    for module_name, step_name in _STEPS:
        step = getattr(sys.modules.get(module_name), step_name, None)
        compatible = getattr(step, "compatible_transports", None)
        if isinstance(compatible, set):
            compatible.add(driver_type)
    _unblock_retries()


def _unblock_retries() -> None:
    """Let kombu's retries yield in a gevent worker.

    gevent's patch_all imports kombu (it touches Celery's lazy proxies) before it has replaced
    time.sleep: kombu then keeps the blocking one, and a worker that waits for the server stands
    still as a whole, the renewal of its leases included.
    """
    monkey = sys.modules.get("gevent.monkey")
    functional = sys.modules.get("kombu.utils.functional")
    if monkey is not None and functional is not None and monkey.is_module_patched("time"):
        functional.sleep = time.sleep  # type: ignore[attr-defined]


def is_workers_event(exchange: str) -> bool:
    """True if that is where this worker tells about itself and its tasks: heartbeats and such."""
    if "celery.worker.state" not in sys.modules:
        return False
    from celery import current_app

    return bool(exchange == current_app.conf.event_exchange)


def is_stopping() -> bool:
    """True if this is a worker that was told to end, and has not noticed yet.

    A prefork worker that then gets a task hands it to a process, forgets it with the others that
    have not said that they have started, and so gives it back although it is carried out: it
    would run twice, and billiard would wait 30 seconds for that process.
    """
    state = sys.modules.get("celery.worker.state")
    if state is None:
        return False
    # An exit code of 0 is a reason to stop too.
    return any(
        told is not None and told is not False
        for told in (state.should_stop, state.should_terminate)
    )


def free_slots(prefetch_count: int) -> int | None:
    """Return how many of this worker's processes have nothing to do; None: this is no worker.

    The worker's prefetch count is its concurrency times ``worker_prefetch_multiplier``.
    """
    state = sys.modules.get("celery.worker.state")
    if state is None or not prefetch_count:
        return None
    from celery import current_app

    multiplier = current_app.conf.worker_prefetch_multiplier or 1
    return max(1, prefetch_count // multiplier) - len(state.reserved_requests)


def survives(callback: Any) -> bool:
    """True if Celery's worker itself takes the messages of this `basic_consume` callback.

    Its handlers raise on messages that are no tasks and no events, of shapes that nobody has
    thought of, which would end the worker.  Whoever else consumes is told of his own errors.
    """
    consumer = getattr(callback, "__self__", None)
    handlers = [
        getattr(consumer, "on_message", None),
        *(getattr(consumer, "callbacks", None) or ()),
    ]
    for handler in handlers:
        # The gossip's is a functools.partial.
        module = getattr(getattr(handler, "func", handler), "__module__", None)
        if isinstance(module, str) and module.startswith("celery.worker."):
            return True
    return False


def misshapen(headers: Any) -> str | None:
    """Say what Celery's worker would stumble over once it has taken a task with these headers.

    Outside of its message handler, that is: where it waits for a free process, that ends the
    worker; in a green thread the message stays unsettled for ever.
    """
    if not isinstance(headers, dict) or "task" not in headers:
        return None
    limits = headers.get("timelimit")
    if limits and not (
        isinstance(limits, (list, tuple))
        and len(limits) == 2
        and all(limit is None or _is_seconds(limit) for limit in limits)
    ):
        return "header 'timelimit' is no pair of numbers"
    stamps = headers.get("stamped_headers")
    if stamps and not (
        isinstance(stamps, (list, tuple)) and all(isinstance(stamp, str) for stamp in stamps)
    ):
        return "header 'stamped_headers' is no list of names"
    if not isinstance(headers.get("shadow") or "", str):
        return "header 'shadow' is no text"
    return None


def _is_seconds(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < _LONGEST_LIMIT
