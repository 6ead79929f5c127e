"""A TCP proxy in front of the server, to break the network on purpose.

Each command returns when it has taken effect, so a test needs no sleep around it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator

import pytest
from fix_postgres import Server

from kombu_pgnotify.embedded import HOST, free_port

CHUNK = 65536  # bytes forwarded at once
COMMAND_TIMEOUT = 10.0  # seconds; a command takes a millisecond
# (on, seconds): close() drops what is unsent and resets the connection, as a crashed host does
RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """Forwards connections to a server, from a thread with an event loop of its own."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.port = free_port()
        self.accepted = 0  # connections so far
        self._listener: asyncio.Server | None = None
        self._delay = 0.0
        # each connection's task, and its ends: the client's and, once connected, the server's
        self._links: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="proxy")

    def start(self) -> None:
        self._thread.start()
        assert self._started.wait(COMMAND_TIMEOUT), f"the proxy cannot listen on {self.port}"

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(COMMAND_TIMEOUT)
        assert not self._thread.is_alive(), "the proxy does not stop"

    def url(self, dbname: str | None = None, **changes: str) -> str:
        """Return the URL of a database by way of the proxy; arguments as of `Server.url`."""
        return self.server.url(dbname, address=(HOST, self.port), **changes)

    @property
    def connections(self) -> int:
        """How many connections are open now."""
        return len(self._links)

    def cut(self) -> None:
        """Reset all connections, on both sides. New ones are welcome."""
        self._run(self._cut)

    def freeze(self) -> None:
        """Forward nothing any more, but keep the connections: a network that swallows packets.

        A new connection is accepted and gets no answer.
        """
        self._run(self._thawed.clear)

    def thaw(self) -> None:
        """Forward again, first of all what came in the meantime."""
        self._run(self._thawed.set)

    def refuse(self) -> None:
        """Refuse new connections, as a host does where no server runs. Those open live on."""
        self._run(self._close_listener)

    def accept(self) -> None:
        """Accept connections again, on the same port."""
        self._run(self._listen)

    def delay(self, seconds: float) -> None:
        """Forward each piece of data this much later, in both directions."""
        self._delay = seconds

    def _run(self, command: Callable[[], object]) -> None:
        """Run the command in the proxy's thread and wait for it."""

        async def run() -> None:
            result = command()
            if asyncio.iscoroutine(result):
                await result

        asyncio.run_coroutine_threadsafe(run(), self._loop).result(COMMAND_TIMEOUT)

    async def _main(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._stopping = asyncio.Event()
        self._thawed = asyncio.Event()
        self._thawed.set()
        await self._listen()
        self._started.set()
        await self._stopping.wait()
        await self._close_listener()
        # Until there is none left that was just being accepted.
        while others := asyncio.all_tasks() - {asyncio.current_task()}:
            await self._cut()
            await asyncio.wait(others, timeout=0.01)

    async def _listen(self) -> None:
        if not self._listener or not self._listener.is_serving():
            self._listener = await asyncio.start_server(self._accept, HOST, self.port)

    async def _close_listener(self) -> None:
        if not self._listener:
            return
        for listening in self._listener.sockets:
            self._loop.remove_reader(listening.fileno())
        # Before Python 3.12 what is just being accepted fails where the server is closed, and its
        # socket stays open.
        while accepting := [task for task in asyncio.all_tasks() if _accepts(task)]:
            await asyncio.wait(accepting)
        self._listener.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        task = asyncio.get_running_loop().create_task(self._forward(reader, writer))
        self._links[task] = [writer]
        task.add_done_callback(self._links.pop)

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve one connection until one side closes it."""
        with contextlib.suppress(OSError, asyncio.CancelledError), contextlib.closing(writer):
            await self._thawed.wait()
            server_reader, server_writer = await asyncio.open_connection(*self.server.address)
            with contextlib.closing(server_writer):
                self._links[asyncio.current_task()].append(server_writer)
                await asyncio.gather(
                    self._pump(reader, server_writer), self._pump(server_reader, writer)
                )

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK):
            await asyncio.sleep(self._delay)
            await self._thawed.wait()
            writer.write(data)
            await writer.drain()
        await self._thawed.wait()
        writer.close()

    async def _cut(self) -> None:
        tasks, writers = list(self._links), [w for link in self._links.values() for w in link]
        for writer in writers:
            with contextlib.suppress(OSError):  # closed meanwhile
                sock = writer.get_extra_info("socket")
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            writer.transport.abort()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, *(w.wait_closed() for w in writers), return_exceptions=True)


def _accepts(task: asyncio.Task[object]) -> bool:
    return getattr(task.get_coro(), "__name__", "") == "_accept_connection2"


@pytest.fixture
def make_proxy() -> Iterator[Callable[[Server], Proxy]]:
    """A function that puts a proxy in front of a server, such as `own_server`."""
    with contextlib.ExitStack() as stack:

        def make(server: Server) -> Proxy:
            proxy = Proxy(server)
            proxy.start()
            stack.callback(proxy.stop)
            return proxy

        yield make


@pytest.fixture
def proxy(server: Server, make_proxy: Callable[[Server], Proxy]) -> Proxy:
    """A proxy in front of this run's server."""
    return make_proxy(server)
