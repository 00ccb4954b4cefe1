"""The real side channel: ZMQ sockets in a trio loop. Implements `ports.side_channel`.

    channel    all sockets of a process: makes them, says who may connect where, keeps clients within bounds
    requester  one question to one listener
    link       a connection to a listener
    listener   requests of all who are connected, and replies to each
    monitor    what becomes of a connection
    frames     endpoints, frames and messages
    refusals   why a connection cannot be had, in words

pyzmq has no trio support, so a socket is watched through its `zmq.FD`. libzmq makes that descriptor readable only when
its state changes from "nothing to look at", and any call on the socket may use the change up. Hence two rules: (1) try
the operation without blocking first and park only when it says EAGAIN; (2) after any other call on the same socket read
EVENTS, and wake the parked task if there is something to receive.

A message is taken in one go, without a checkpoint, so a cancelled receive takes nothing.
"""

from connector.ports.zmq_bridge.channel import ZmqSideChannel
from connector.ports.zmq_bridge.link import ZmqLink
from connector.ports.zmq_bridge.listener import ZmqListener
from connector.ports.zmq_bridge.requester import ZmqRequester

__all__ = ("ZmqLink", "ZmqListener", "ZmqRequester", "ZmqSideChannel")
