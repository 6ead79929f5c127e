"""Makes the ``pgnotify`` scheme known to kombu, without an import in the user's code.

kombu has no entry point group for transports. It does load the ``kombu.serializers`` group while
``kombu.serialization`` is imported, which every Celery process does early, so that group brings us
here: importing this module (its package, to be exact) registers the transport's alias. It is a
detour, and it has a price: whatever is raised here breaks ``import celery`` for every application
in the environment. So this module imports nothing but the standard library at its top, and
:func:`register_transport` raises nothing.

The entry point must name a serializer, so it names a real one, ``pgnotify-json``: JSON as RFC 8259
has it and nothing else. kombu's own ``json`` writes ``{"__type__": …}`` objects that only kombu
reads back, and ``NaN``, which PostgreSQL's json type and most other languages refuse.
"""

from __future__ import annotations

import json
import logging
from typing import Any

logger = logging.getLogger(__name__)

SCHEME = "pgnotify"
TRANSPORT = "kombu_pgnotify.transport:Transport"


def _encode(value: Any) -> str:
    """Return the value as plain JSON; refuse what JSON cannot say."""
    return json.dumps(value, allow_nan=False, separators=(",", ":"))


def _decode(text: str | bytes | bytearray) -> Any:
    """Return the value that plain JSON text stands for."""
    return json.loads(text)


#: What kombu registers as ``pgnotify-json``: encoder, decoder, content type, content encoding.
#: The content type is our own: the one of the real ``json`` would take that serializer's place.
SERIALIZER = (_encode, _decode, "application/x-pgnotify-json", "utf-8")


def register_transport() -> None:
    """Let kombu find our transport by its scheme, unless somebody else has taken the name."""
    try:
        # Imported here, below SERIALIZER: kombu may come back for that name while it is imported.
        from kombu.transport import TRANSPORT_ALIASES

        TRANSPORT_ALIASES.setdefault(SCHEME, TRANSPORT)
    except Exception:
        # On purpose everything, and only here: this runs inside `import kombu` of applications
        # that may not use us at all, and those have to start. One that does use us meets kombu's
        # "No such transport: pgnotify", for which this record is the reason.
        logger.warning("transport_alias_not_registered", exc_info=True)
