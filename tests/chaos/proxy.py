"""TCP proxies between decode engines and prefill engines: they delay, hold back, reset and refuse.

All run in one trio thread (`ProxyThread`). A proxy of a side channel also puts a proxy before the control socket that
the handshake names: it reads the ZMTP frames that go to the client (a greeting of 64 bytes, then frames with a byte of
flags and a length of one byte or eight), and replaces the address in each payload of a handshake that it knows.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Awaitable, Callable
from types import TracebackType

import msgspec
import trio

from tests.rig.network import free_port

CHUNK_BYTES = 1 << 16
HELD_BACK_POLL_SECONDS = 0.02
START_TIMEOUT_SECONDS = 10.0

Transform = Callable[[bytes], Awaitable[bytes]]

_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Proxy:
    """One listening port in front of another address. Methods may be called in any thread.

    Attributes:
        delay_seconds: each chunk of bytes waits so long.
        holds_back: while it is true nothing passes, and nothing is lost.
    """

    def __init__(self, thread: ProxyThread, target: tuple[str, int], names_control: bool) -> None:
        self._thread = thread
        self._target_host, self._target_port = target
        self._names_control = names_control
        self._scopes: set[trio.CancelScope] = set()
        self._listening: tuple[trio.SocketListener, trio.CancelScope] | None = None
        # One that no outgoing connection takes while nothing listens there.
        self._port = free_port()
        self._behind: dict[int, Proxy] = {}
        self.delay_seconds = 0.0
        self.holds_back = False

    @property
    def port(self) -> int:
        """Where it listens, or would if it did not refuse."""
        return self._port

    @property
    def control(self) -> Proxy | None:
        """The proxy of the control socket that was named last; None: no handshake was seen yet."""
        return next(reversed(self._behind.values()), None)

    @property
    def connections(self) -> int:
        return len(self._scopes)

    def reset(self) -> None:
        """Every connection ends with a reset."""
        self._thread.call(self._reset)

    def refuse(self) -> None:
        """Connections end with a reset, and new ones are refused."""
        self._thread.call(self._refuse)

    def listen(self) -> None:
        """The end of `refuse`."""
        self._thread.call_async(self.open)

    def forget_control(self) -> None:
        """The process behind has ended, and its control socket with it."""
        self._thread.call(self._forget_control)

    # --- in the thread of the proxies -------------------------------------------------------------------------------

    async def open(self) -> None:
        """Listen, unless it does."""
        if self._listening is None:
            (listener,) = await trio.open_tcp_listeners(self._port, host=self._thread.host)
            await self._thread.nursery.start(self._serve, listener)

    async def _serve(
        self, listener: trio.SocketListener, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.CancelScope() as scope:
            self._listening = listener, scope
            task_status.started()
            async with listener:
                await trio.serve_listeners(self._connection, [listener], handler_nursery=self._thread.nursery)

    async def _connection(self, client: trio.SocketStream) -> None:
        with trio.CancelScope() as scope, contextlib.suppress(OSError):
            self._scopes.add(scope)
            try:
                async with client:
                    # Closed in any way but its own end, a connection ends with a reset.
                    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
                    if self._listening is not None:  # it may have been accepted just before
                        async with await trio.open_tcp_stream(self._target_host, self._target_port) as server:
                            await self._pass_on(client, server)
            finally:
                self._scopes.discard(scope)

    async def _pass_on(self, client: trio.SocketStream, server: trio.SocketStream) -> None:
        rewrite = _HandshakeRewriter(self._control_of).feed if self._names_control else _as_it_is
        async with trio.open_nursery() as both:

            async def copy(source: trio.SocketStream, sink: trio.SocketStream, transform: Transform) -> None:
                with contextlib.suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                    while data := await source.receive_some(CHUNK_BYTES):
                        if self.delay_seconds:
                            await trio.sleep(self.delay_seconds)
                        while self.holds_back:
                            await trio.sleep(HELD_BACK_POLL_SECONDS)
                        await sink.send_all(await transform(data))
                # ZMQ uses no half-closed connections: one side's end is the end.
                both.cancel_scope.cancel()

            both.start_soon(copy, client, server, _as_it_is)
            both.start_soon(copy, server, client, rewrite)

    async def _control_of(self, port: int) -> tuple[str, int]:
        """The address of the proxy in front of this control socket, made when it is named for the first time."""
        if port not in self._behind:
            proxy = Proxy(self._thread, (self._target_host, port), names_control=False)
            await proxy.open()
            self._behind[port] = proxy
        return self._thread.host, self._behind[port].port

    def _reset(self) -> None:
        for scope in list(self._scopes):
            scope.cancel()

    def _refuse(self) -> None:
        if self._listening is not None:
            listener, scope = self._listening
            self._listening = None
            scope.cancel()
            listener.socket.close()
        self._reset()

    def _forget_control(self) -> None:
        for proxy in self._behind.values():
            proxy._refuse()
        self._behind.clear()


async def _as_it_is(data: bytes) -> bytes:
    return data


class _HandshakeRewriter:
    """What a side channel says to one client, with the address of the control socket replaced."""

    GREETING_BYTES = 64
    LONG = 2

    def __init__(self, replacement: Callable[[int], Awaitable[tuple[str, int]]]) -> None:
        self._replacement = replacement
        self._greeting_left = self.GREETING_BYTES
        self._held = b""

    async def feed(self, data: bytes) -> bytes:
        """What may go on to the client now."""
        said, self._held = self._held + data, b""
        out, at = [said[: self._greeting_left]], min(self._greeting_left, len(said))
        self._greeting_left -= at
        while at < len(said):
            flags = said[at]
            head = 9 if flags & self.LONG else 2
            length = int.from_bytes(said[at + 1 : at + head], "big")
            if len(said) < at + head or len(said) < at + head + length:
                break
            out.append(await self._frame(flags, said[at + head : at + head + length]))
            at += head + length
        self._held = said[at:]
        return b"".join(out)

    async def _frame(self, flags: int, body: bytes) -> bytes:
        body = await self._rewritten(body)
        long = len(body) > 255
        flags = flags | self.LONG if long else flags & ~self.LONG
        return bytes([flags]) + len(body).to_bytes(8 if long else 1, "big") + body

    async def _rewritten(self, body: bytes) -> bytes:
        try:
            payload = msgspec.msgpack.decode(body)
            actor = payload["actor"]
            port = actor["control_port"]
        except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError, IndexError):
            return body
        host, port = await self._replacement(port)
        return msgspec.msgpack.encode(payload | {"actor": actor | {"control_host": host, "control_port": port}})


class ProxyThread:
    """Runs proxies until the `with` block is left. `host`: where they listen."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._main, name="proxies")
        self._token: trio.lowlevel.TrioToken | None = None
        self.nursery: trio.Nursery

    def proxy(self, target: tuple[str, int], *, names_control: bool) -> Proxy:
        """A new one that listens, in front of the address `target`; `names_control`: that is a side channel."""
        proxy = Proxy(self, target, names_control)
        self.call_async(proxy.open)
        return proxy

    def call(self, work: Callable[[], None]) -> None:
        """Run it in the thread, and wait for it."""
        trio.from_thread.run_sync(work, trio_token=self._token)

    def call_async(self, work: Callable[[], Awaitable[None]]) -> None:
        """The same for an asynchronous function."""
        trio.from_thread.run(work, trio_token=self._token)

    def __enter__(self) -> ProxyThread:
        self._thread.start()
        if not self._ready.wait(START_TIMEOUT_SECONDS):
            raise RuntimeError("the thread of the proxies did not start")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.call(lambda: self.nursery.cancel_scope.cancel())
        self._thread.join()

    def _main(self) -> None:
        trio.run(self._run)

    async def _run(self) -> None:
        async with trio.open_nursery() as self.nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._ready.set()
            await trio.sleep_forever()
