"""What goes over a ZMQ socket: endpoints, frames, and messages that are taken within bounds."""

from __future__ import annotations

from typing import TypeAlias

import msgspec
import zmq

from connector.addresses import join_address

Socket: TypeAlias = "zmq.Socket[bytes]"

SHORT_BODY_BYTES_MAX, SHORT_HEADER_BYTES, LONG_HEADER_BYTES = 255, 2, 9
"""The header of a ZMTP frame has the flags, and the length in one byte or, for a longer body, in eight."""

ENCRYPTION_BYTES = 33
"""What CURVE adds to a frame: the name of the command, a nonce, a code of authentication, the flags."""


def endpoint(host: str, port: int) -> str:
    """The ZMQ endpoint; IPv6 addresses in brackets."""
    return f"tcp://{join_address(host, port)}"


def wire_bytes(frame_bytes: int, is_encrypted: bool) -> int:
    """What a frame of so many bytes has on the wire."""
    body_bytes = frame_bytes + ENCRYPTION_BYTES if is_encrypted else frame_bytes
    return body_bytes + (SHORT_HEADER_BYTES if body_bytes <= SHORT_BODY_BYTES_MAX else LONG_HEADER_BYTES)


class Message(msgspec.Struct, frozen=True):
    """A ZMQ message as it was taken from a socket."""

    frames: tuple[bytes, ...]
    is_whole: bool
    """Otherwise it was out of bounds. The rest is still in the socket, which is of no more use."""

    @property
    def is_delimited(self) -> bool:
        """It is within bounds, and something follows an empty frame."""
        return self.is_whole and len(self.frames) >= 2 and self.frames[0] == b""


def receive_bounded(open_socket: Socket, frames_max: int, frame_bytes_max: int) -> Message | None:
    """Take one message without waiting; None when there is none. Of one that is out of bounds no more than one frame
    beyond them is taken: there may be millions, and who sends it is not heard any further."""
    frames: list[bytes] = []
    while True:
        try:
            frame = open_socket.recv(zmq.NOBLOCK)
        except zmq.Again:  # only before the first frame: libzmq delivers messages whole
            return None
        if len(frames) == frames_max or len(frame) > frame_bytes_max:
            return Message(tuple(frames), is_whole=False)
        frames.append(frame)
        if not open_socket.getsockopt(zmq.RCVMORE):
            return Message(tuple(frames), is_whole=True)
