"""What to do about each kind of failure, for people who read a trace. README.md has the same table with more room."""

from __future__ import annotations

ADVICE: dict[str, str] = {
    "AbortedByClient": "nothing: the client left",
    "ActorCrashed": "a bug: report it with the log and the trace",
    "BadParams": "make the router forward kv_transfer_params unchanged; the text names the field and both values",
    "BlocksConsumed": "prefill again before a retry: these blocks were read and released already",
    "ConnectionRefused": "start P, or correct its address: nothing listens there",
    "ConnectorStopped": "restart the engine if it was not shut down; the log says why its connector stopped",
    "ConsumerUnknown": "find out who released what is not lent; P is not disturbed",
    "ControlLinkLost": "did the worker of P die, and are its ports open to D? It is rebuilt by itself",
    "DeadlineExceeded": "see which state took the time (trace slow); request_timeout_seconds is the limit",
    "HandshakeMalformed": "check the port: something else listens there, or an unlike version",
    "HandshakeRefused": "read the text: P says why it refuses; has one of its workers died?",
    "HandshakeTimeout": "is P up, and does VLLM_NIXL_SIDE_CHANNEL_HOST name an address that D can reach?",
    "Incompatible": "start both engines alike; the text has the field and both values",
    "LeaseExpired": "did D fail, or never get the request? does its queue exceed the lease (trace show)?",
    "LeaseNotProven": "P hangs, or its control socket does: all bytes came, and nobody confirmed that they were kept",
    "LeaseOver": "prefill again; does D's queue exceed lease_limit_seconds, or did another engine read the blocks?",
    "MessageMalformed": "find out who sends it; nothing is disturbed",
    "NotificationsDropped": "find out who floods this engine",
    "PeerBackoff": "look at the failure before it: P is tried again by itself",
    "PeerRetired": "prefill again: another engine has taken P's address, or P was forgotten for want of use",
    "Quarantined": "as ReadNeverEnded; the blocks return to the pool when their READs have ended",
    "ReadNeverEnded": "P hangs, or the network does; the connection is given up until the READs end",
    "TooManyPeers": "raise peer_limit",
    "TransferError": "the connection is rebuilt by itself; if it comes often, look at NIXL's log and the network",
    "WrongEngine": "two engines share an address, or P was replaced",
}
"""By kind; `LeaseExpired` is P's side of a lease that ran out."""
