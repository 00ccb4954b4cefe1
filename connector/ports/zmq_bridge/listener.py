"""A listener: requests of all who are connected, and replies to each.

* It receives in one task and replies from any. Calls on a socket use up what its descriptor says (see the package's
  text), so `reply` looks whether something has come, and then cancels the scope that `receive` parks in.
* Bounds: frames larger than `frame_bytes_max` are dropped here and counted; those of more than twice that make libzmq
  drop the connection before it holds them in memory (not counted: they never arrive). Bytes that are not ZMTP end their
  connection inside libzmq as well, and so does a greeting that takes too long.
* Messages of all connections are handed out in turn, and libzmq reads no more of a connection while some of its
  messages wait. How many connections there may be, what each may cost, and that a message must end, is for the doorman
  (`connector/ports/doorman.py`).
* libzmq has no limit to the frames of a message, and a ROUTER hands out nothing else before the last one was taken,
  also when the connection has ended. So a message of too many frames is dropped in pieces: no other can be read
  meanwhile, but other tasks go on. Its sender is shut out for a while. How many frames there can be is bounded by the
  bytes that may come: an empty frame has two of them, and takes 64 in memory.
* Replies are queued for each connection, and few: an engine that reads none is cut off by the kernel after a while. A
  large reply that is sent to many is kept once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import trio
import zmq

from connector.ports.doorman import Doorman
from connector.ports.side_channel import FRAMES_TOO_MANY_MAX, ListenerCounts, ReplyAddress, Request
from connector.ports.zmq_bridge.frames import Socket, wire_bytes

if TYPE_CHECKING:
    from connector.ports.zmq_bridge.channel import ZmqSideChannel

DROPPED_UNITS, DROPPED_FRAME_UNITS = 4, 1
"""What a message out of bounds costs its sender, and each frame of it that is dropped; see `Listener.charge`."""

DROPPED_AT_A_TIME = 512
"""Frames that a listener drops before other tasks have their turn: a millisecond or so. It takes no other message
before the last frame of a message was dropped, so turns must not be much shorter either."""
FRAMES_PER_MESSAGE = 8
"""To look at a message costs as much as to drop so many frames."""

SHARED_FRAME_BYTES_MIN = 64 * 1024
SHARED_FRAMES_MAX = 16
"""Frames of replies that are so large are kept for the next reply that is equal, so many of them."""


class _Dropped:
    """A message that a listener is dropping."""

    __slots__ = ("first", "frames", "has_swamped", "sender", "wire_bytes")

    def __init__(self, sender: bytes, first: zmq.Frame, frames: int = 0, wire_bytes: int = 0) -> None:
        self.sender = sender
        # The frame that says whose it is.
        self.first = first
        # So many were taken, that one not counted, and so many bytes they had on the wire.
        self.frames = frames
        self.wire_bytes = wire_bytes
        # It has too many frames, and the doorman knows. Their bytes are of no more interest.
        self.has_swamped = False


class ZmqListener:
    """A bound ROUTER. Made by `ZmqSideChannel.listen`."""

    def __init__(
        self,
        channel: ZmqSideChannel,
        router: Socket,
        doorman: Doorman,
        unguard: Callable[[], None],
        frames_max: int,
        frame_bytes_max: int,
    ) -> None:
        self._channel = channel
        self._is_encrypted = channel.access.keys is not None
        self._unguard = unguard
        self._router = router
        self._doorman = doorman
        self._frames_max = frames_max
        self._frame_bytes_max = frame_bytes_max
        self._port = int(router.getsockopt_string(zmq.LAST_ENDPOINT).rsplit(":", 1)[1])
        self._closed = False
        self._receiving = False
        self._parked: trio.CancelScope | None = None
        self._oversized_requests = 0
        self._undelimited_requests = 0
        self._dropped_replies = 0
        # Large frames of replies, the one that was sent last comes last.
        self._shared: OrderedDict[bytes, zmq.Frame] = OrderedDict()
        # Frames of it are still to come.
        self._dropping: _Dropped | None = None
        # Only so much was taken at a time.
        self._has_more = False

    @property
    def port(self) -> int:
        return self._port

    async def receive(self) -> Request:
        """One task at a time. Raises trio.ClosedResourceError once the listener is closed."""
        if self._receiving:
            raise trio.BusyResourceError("another task is receiving from this listener")
        self._receiving = True
        try:
            await trio.lowlevel.checkpoint_if_cancelled()
            while True:
                request = self._take()
                if request is not None:
                    await trio.lowlevel.cancel_shielded_checkpoint()
                    return request
                if self._has_more:
                    await trio.lowlevel.checkpoint()
                else:
                    await self._park()
        finally:
            self._receiving = False

    async def _park(self) -> None:
        """Wait until there may be something to do: a descriptor says so, `reply` does, it is time, or it is closed."""
        with trio.CancelScope() as self._parked:
            with trio.move_on_after(self._doorman.seconds_to_look()):
                await trio.lowlevel.wait_readable(self._doorman.fileno())
        self._parked = None

    def _take(self) -> Request | None:
        """The next request within bounds, without waiting; None when there is none now, or `_has_more` to look at."""
        self._has_more = False
        if self._closed:
            raise trio.ClosedResourceError("this listener is closed")
        self._doorman.look(is_dropping=self._dropping is not None)
        frames_left = DROPPED_AT_A_TIME
        while frames_left > 0:
            if self._dropping is not None:
                frames_left -= self._drop(self._dropping, frames_left)
                continue
            try:
                first = self._router.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                self._doorman.none_waits()
                return None
            frames_left -= FRAMES_PER_MESSAGE
            identity = first.bytes
            if not self._doorman.hears(identity, first):
                self._dropping = _Dropped(identity, first)
                continue
            frames, oversized = self._receive_rest(identity, first)
            if len(frames) < 2 or frames[0] != b"":
                self._undelimited_requests += 1
            elif oversized:
                self._oversized_requests += 1
            else:
                return Request(identity, frames[1:])
            self._doorman.charge(identity, DROPPED_UNITS, understood=False)
        self._has_more = True
        return None

    def _receive_rest(self, identity: bytes, first: zmq.Frame) -> tuple[tuple[bytes, ...], bool]:
        """The frames of a message after the identity, and whether some are missing or were cut."""
        frames: list[bytes] = []
        oversized = False
        taken_bytes = 0
        while self._router.getsockopt(zmq.RCVMORE):
            if len(frames) > self._frames_max:
                self._dropping = _Dropped(identity, first, len(frames), taken_bytes)
                return tuple(frames), True
            frame = self._router.recv(zmq.NOBLOCK)
            taken_bytes += wire_bytes(len(frame), self._is_encrypted)
            is_large = len(frame) > self._frame_bytes_max
            oversized |= is_large
            frames.append(b"" if is_large else frame)
        self._doorman.taken(identity, taken_bytes)
        return tuple(frames), oversized

    def _drop(self, message: _Dropped, frames_max: int) -> int:
        """Up to so many frames of it; how many. They are there: libzmq delivers messages whole. Frames are neither
        copied nor asked for twice: of strangers there may be many."""
        dropped = 0
        has_more = bool(self._router.getsockopt(zmq.RCVMORE))
        while has_more and dropped < frames_max:
            frame = self._router.recv(zmq.NOBLOCK, copy=False)
            has_more = frame.more
            dropped += 1
            if not message.has_swamped:
                message.wire_bytes += wire_bytes(len(frame), self._is_encrypted)
        message.frames += dropped
        if message.frames > self._frames_max + 1 + FRAMES_TOO_MANY_MAX and not message.has_swamped:
            message.has_swamped = True
            self._doorman.swamped(message.sender, message.first)
        if not has_more:
            self._dropping = None
            if not message.has_swamped:
                self._doorman.taken(message.sender, message.wire_bytes)
                units = message.frames * DROPPED_FRAME_UNITS
                self._doorman.charge(message.sender, units, understood=False)
                if message.frames > self._frames_max + 1:
                    self._doorman.dropped_frames(message.sender, message.first, message.frames)
        return dropped

    def reply(self, address: ReplyAddress, frames: Sequence[bytes]) -> None:
        """Raises trio.ClosedResourceError once the listener is closed."""
        if self._closed:
            raise trio.ClosedResourceError("this listener is closed")
        try:
            self._router.send_multipart([address, b"", *map(self._shareable, frames)], zmq.NOBLOCK, copy=False)
        except zmq.ZMQError:  # EHOSTUNREACH: the requester is gone. EAGAIN: it does not read.
            self._dropped_replies += 1
        if self._parked is not None and int(self._router.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._parked.cancel()

    def _shareable(self, frame: bytes) -> bytes | zmq.Frame:
        """In a form that costs no memory for each requester that it is queued for, if it is large."""
        if len(frame) < SHARED_FRAME_BYTES_MIN:
            return frame
        shared = self._shared.pop(frame, None) or zmq.Frame(frame, copy=True)
        self._shared[frame] = shared
        if len(self._shared) > SHARED_FRAMES_MAX:
            self._shared.popitem(last=False)
        return shared

    def sender_of(self, address: ReplyAddress) -> str:
        return self._doorman.sender_of(address)

    def charge(self, address: ReplyAddress, units: int, *, understood: bool = True) -> None:
        self._doorman.charge(address, units, understood=understood)

    def counts(self) -> ListenerCounts:
        return ListenerCounts(
            oversized_requests=self._oversized_requests,
            undelimited_requests=self._undelimited_requests,
            dropped_replies=self._dropped_replies,
            dropped_requests=self._doorman.dropped,
        )

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._channel.forget(self)
            trio.lowlevel.notify_closing(self._doorman.fileno())  # wakes the task that is parked on it
            self._unguard()
            self._doorman.close()
            self._router.close()
