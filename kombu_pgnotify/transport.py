"""Transport: kombu's contract, error classes, event loop and synchronous draining."""

from __future__ import annotations

import logging
import os
import threading
from time import monotonic
from typing import Any

import psycopg
from kombu.transport import virtual

from . import broker as brokers, options, urls
from .broker import Broker
from .celery.worker import introduce
from .channel import Channel
from .consumers import Consumer
from .consumption import Consumption
from .errors import ConfigurationError, DatabaseUnavailable, PgnotifyError, StatementFailed
from .eventloop import HubLink
from .keeper import LeaseKeeper
from .options import Options
from .qos import flush
from .waker import Waker

logger = logging.getLogger(__name__)


class Transport(virtual.Transport):
    """kombu transport for PostgreSQL.

    Made by kombu for every Connection, most of them never connected: nothing happens
    before :meth:`establish_connection`.

    Arguments:
        client: the kombu Connection.
    """

    Channel = Channel

    can_parse_url = True
    driver_type = "pgnotify"
    driver_name = "psycopg"

    #: What kombu and Celery retry; nothing else is worth retrying.
    connection_errors: Any = (
        *virtual.Transport.connection_errors,
        DatabaseUnavailable,
    )
    channel_errors: Any = (
        *virtual.Transport.channel_errors,
        StatementFailed,
    )
    recoverable_connection_errors = connection_errors
    recoverable_channel_errors: tuple[type[Exception], ...] = ()

    implements = virtual.Transport.implements.extend(
        asynchronous=True,
        batch_publish=True,
        exchange_type=frozenset(["direct", "topic", "fanout"]),
        heartbeats=False,
    )

    def __init__(self, client: Any, **kwargs: Any) -> None:
        super().__init__(client, **kwargs)
        self._options: Options | None = None
        self._broker: Broker | None = None
        self._pid = self._user_pid = os.getpid()
        self._connected = False
        self._link: HubLink | None = None
        # The thread that is inside a delivery of drain_events.
        self._drained_by: int | None = None
        self._waker: Waker | None = None
        self._consumption: Consumption | None = None
        _hide_password(client)
        introduce(self.driver_type)

    # -- what channels need

    @property
    def broker(self) -> Broker:
        """The current process's broker (a fork changes it).

        Raises:
            ConfigurationError: a wrong URL or option.
        """
        if self._options is None:
            self._options = _options_of(self.client)
        broker = self._broker
        if broker is None or broker.pid != os.getpid():
            broker = self._broker = brokers.for_options(self._options)
        if self._connected and broker.pid != self._user_pid:
            # Inherited by a fork: now a user of the child's broker, whose connections stay open.
            self._user_pid = broker.pid
            broker.database.adopt()
        return broker

    @property
    def consumption(self) -> Consumption:
        """What this connection consumes.

        Raises:
            DatabaseUnavailable: it is closed, or was inherited by a fork; kombu opens another.
        """
        if os.getpid() != self._pid:
            raise DatabaseUnavailable("this connection is the parent process's")
        if self._consumption is None:
            if not self._connected:
                raise DatabaseUnavailable("this connection is closed")
            self._waker = Waker()
            self._consumption = Consumption(self.broker, self._waker.wake)
        return self._consumption

    @property
    def in_event_loop(self) -> bool:
        """True if kombu's hub drives this connection."""
        return self._link is not None

    @property
    def disables_prefetch(self) -> bool:
        """True if a Celery worker is to take a task only when a process is free."""
        return self.broker.options.disable_prefetch

    def cancel(self, consumer: Consumer) -> None:
        """Stop a consumer; no I/O and no lock."""
        if self._consumption is not None and os.getpid() == self._pid:
            self._consumption.cancel(consumer)

    def see_to_settling(self, keeper: LeaseKeeper) -> None:
        """See that the server learns how deliveries have ended: now, or with others soon.

        An event loop settles within its iteration.  A loop of :meth:`drain_events` that has more
        messages waiting comes back for them, or else the keeper's thread settles.
        """
        if self._link is not None and self._link.settles_soon():
            return
        # Not by the property: a callback may close its connection, or fork, and then acknowledge.
        consumption = self._consumption if self._pid == os.getpid() else None
        drained = self._drained_by == threading.get_ident()
        if drained and consumption is not None and (consumption.waiting or consumption.claim):
            keeper.settle_soon()
        else:
            flush(keeper)

    def credit_regained(self) -> None:
        """A message was settled."""
        if self._consumption is not None:
            self._consumption.credit_regained()

    # -- life

    def establish_connection(self) -> Transport:
        """Make sure that the server and the schema can serve us.

        Raises:
            DatabaseUnavailable: not now.
            ConfigurationError: not without somebody's help.
        """
        self.broker.database.acquire()
        self._connected = True
        self._pid = self._user_pid = os.getpid()
        self._avail_channels.append(self.create_channel(self))
        return self

    def verify_connection(self, connection: Any) -> bool:
        """Tell whether the connection has been established; asked at every turn, so no I/O."""
        return self._connected

    def close_connection(self, connection: Any) -> None:
        """Close in good order: release what is unacknowledged."""
        self._close(lost=False)

    def _collect(self, connection: Any) -> None:
        """kombu's way to get rid of a connection that failed or was inherited by a fork."""
        self._close(lost=True)

    def _close(self, *, lost: bool) -> None:
        """Idempotent; errors of the database are logged, since kombu must go on."""
        if os.getpid() != self._pid:
            # The parent's: its sockets, leases and hub are not ours to touch.
            adopted = self._connected and self._user_pid == os.getpid()
            self._connected = False
            if adopted:
                self.broker.database.release()
            return
        if not self._connected:
            return
        self._connected = False
        if self._link is not None:
            self._link.close()
            self._link = None
        for channel in [*self._avail_channels, *self.channels]:
            channel.close(lost=lost)
        self._avail_channels.clear()
        self.channels.clear()
        if self._consumption is not None:
            self._consumption.close()
            self._consumption = None
        if not lost:
            # A process that ends by os._exit, like multiprocessing's, gives its threads no time.
            flush(self.broker.keeper)
        if self._waker is not None:
            self._waker.close()
            self._waker = None
        self.broker.database.release()

    # -- consuming

    def register_with_event_loop(self, connection: Any, loop: Any) -> None:
        """Consume in kombu's hub; no I/O before its first iteration."""
        if self._link is not None:
            self._link.close()
        consumption = self.consumption
        assert self._waker is not None
        self._link = HubLink(loop, consumption, self.broker.keeper, self._waker)

    def drain_events(self, connection: Any, timeout: float | None = None, **kwargs: Any) -> None:
        """Deliver one message.

        Arguments:
            timeout: seconds to wait for it; None: for ever, 0: only look.

        Raises:
            TimeoutError: none came (kombu calls it socket.timeout).
            DatabaseUnavailable: reconnect.
        """
        deadline = None if timeout is None else monotonic() + timeout
        consumption = self.consumption
        while not self._deliver_one(consumption):
            left = None if deadline is None else deadline - monotonic()
            if left is not None and left <= 0:
                raise TimeoutError(f"no message within {timeout} seconds")
            look = consumption.next_look()
            waits = [seconds for seconds in (left, look) if seconds is not None]
            if self._waker is None:
                raise DatabaseUnavailable("the connection was closed while it was drained")
            self._waker.wait(min(waits) if waits else None)

    def _deliver_one(self, consumption: Consumption) -> bool:
        self._drained_by = threading.get_ident()
        try:
            return consumption.deliver_one(one_by_one=True)
        finally:
            self._drained_by = None

    # -- what people see

    def driver_version(self) -> str:
        """psycopg's version, for ``celery report``."""
        return psycopg.__version__

    @property
    def default_connection_params(self) -> dict[str, Any]:
        """Nothing: libpq has its own defaults."""
        return {}

    def as_uri(self, uri: str, include_password: bool = False, mask: str = "**") -> str:
        """Return the URL for people, the password masked unless asked for."""
        client = self.client
        uri = uri or ""
        if "://" not in uri:
            uri = f"pgnotify://{_authority(client, uri)}"
        url, user, password = urls.without_password(uri)
        user = user or getattr(client, "userid", None)
        secret: Any = getattr(client, "password", None) if password is None else password
        if include_password and callable(secret):
            secret = secret()
        shown = secret if include_password or secret is None else mask
        prefix = getattr(client, "uri_prefix", None)
        return (f"{prefix}+" if prefix else "") + urls.with_credentials(url, user, shown)


def _hide_password(client: Any) -> None:
    """Move user and password out of the URL kombu keeps: monitoring shows ``hostname``."""
    hostname = getattr(client, "hostname", None)
    if isinstance(hostname, str) and "://" in hostname:
        url, user, password = urls.without_password(hostname)
        client.hostname = url
        client.userid = user or client.userid
        if password is not None:
            client.password = password


def _options_of(client: Any) -> Options:
    """Read URL, separate fields, ssl and transport options of a kombu Connection."""
    hostname, password = client.hostname, client.password
    source = password if callable(password) else None
    fields = urls.from_fields(
        hostname, client.port, client.userid, None if source else password, client.virtual_host
    )
    if hostname and "://" in hostname:
        target = urls.parse(hostname, options.NAMES).completed_by(fields)
    else:
        target = fields
    return options.build(
        target.with_ssl(client.ssl),
        client.transport_options or {},
        connect_timeout=client.connect_timeout,
        password_source=source,
    )


def _authority(client: Any, host: str) -> str:
    """Put kombu's separate fields together again, as after a failover."""
    port = getattr(client, "port", None)
    virtual_host = getattr(client, "virtual_host", None) or ""
    return f"{host}{f':{port}' if port else ''}/{virtual_host.removeprefix('/')}"


__all__ = ["ConfigurationError", "PgnotifyError", "Transport"]
