"""Why things fail: one frozen type per reason, with the facts a user needs.

A failure travels as data: it is a field of an event, it is kept in the terminal state of the machine that it ends,
it is a field of the trace record of that transition, and it is what the log line is made from. Nobody parses a
message. `kind` (the class name) is the stable name for dashboards and tests; `str(failure)` is the sentence for people.

Every failure answers: what happened, where (which peer, which field), and what was expected. What a user can do is a
table by kind (`connector/observe/advice.py`), which whoever shows a failure puts beside its sentence. `Incompatible`
alone has advice of its own, because that depends on the field that differs. Traces and tools get kind and sentence and
nothing else, so its sentence ends with it.
"""

from __future__ import annotations

from typing import TypeAlias

import msgspec

ADVICE_FOLLOWS = "; what to do: "
"""Between what happened and what to do about it, in a line for people."""


def and_stood_still(late_seconds: int) -> str:
    """Goes behind a time within which another engine did not do something, where this one may not have noticed."""
    return f", and this engine stood still for at least {late_seconds} s" if late_seconds else ""


class Failure(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all failures. Subclasses say in `__str__` what happened."""

    @property
    def kind(self) -> str:
        """Stable name of the failure: its class name."""
        return type(self).__name__


class PeerFailure(Failure, frozen=True, kw_only=True):
    """A failure of one remote engine. `peer` is its engine id, `address` its side channel."""

    peer: str
    address: str = ""


class HandshakeTimeout(PeerFailure, frozen=True, kw_only=True):
    """No reply on the side channel within the deadline of one attempt. `detail` says how far the question came;
    `late_seconds` is as in DeadlineExceeded."""

    timeout_seconds: float
    detail: str = "how far the question came is not known"
    late_seconds: int = 0

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} at {self.address} did not answer the handshake within "
            f"{self.timeout_seconds:g} s{and_stood_still(self.late_seconds)}; {self.detail}"
        )


class AddressNotResolved(PeerFailure, frozen=True, kw_only=True):
    """The name server of this machine does not know the host of the peer's side channel, or did not answer."""

    host: str
    error: str

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} at {self.address}: the host name {self.host} does not resolve here "
            f"({self.error})"
        )


class ConnectionRefused(PeerFailure, frozen=True, kw_only=True):
    """Nothing listens at the peer's side channel: its process is gone, or the address is wrong."""

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer}: nothing listens at {self.address}; the engine has ended, or "
            "VLLM_NIXL_SIDE_CHANNEL_HOST and _PORT on it name another address"
        )


class NoDescriptorLeft(PeerFailure, frozen=True, kw_only=True):
    """This engine, not the peer, lacks what it takes to connect."""

    def __str__(self) -> str:
        return (
            f"this engine has no descriptor left (`ulimit -n`) to connect to prefill engine {self.peer} at "
            f"{self.address} with"
        )


class ControlLinkLost(PeerFailure, frozen=True, kw_only=True):
    """The connection to a worker's control socket was reset: the worker died, or the network dropped it."""

    detail: str

    def __str__(self) -> str:
        return f"the control connection to prefill engine {self.peer} was lost ({self.detail}); it is rebuilt"


class RegistrationReplaced(PeerFailure, frozen=True, kw_only=True):
    """The peer, a built-in one, has registered its KV cache anew since it was connected: it has slept."""

    registration: int

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} has registered its KV cache anew (number {self.registration}) since it was "
            "connected; it is connected again"
        )


class PeerSilent(PeerFailure, frozen=True, kw_only=True):
    """A worker of the peer has answered nothing of what it was asked about leases, over a connection that stands."""

    worker: str
    waited_seconds: float

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer}: its worker {self.worker} has answered nothing for {self.waited_seconds:g} s; "
            "the process hangs or is stopped, or the network between takes connections and loses what is sent"
        )


class ReadNeverEnded(PeerFailure, frozen=True, kw_only=True):
    """READs from this peer did not become quiescent in time; nothing more is read over that connection."""

    waited_seconds: float

    def __str__(self) -> str:
        return (
            f"READs from prefill engine {self.peer} did not end within {self.waited_seconds:g} s; the connection is "
            "given up, its blocks stay in quarantine until they do"
        )


class FirstReadNeverEnded(PeerFailure, frozen=True, kw_only=True):
    """Nothing could be read from a worker of this peer within the deadline of one attempt, although it answers. No
    request's blocks are involved. `late_seconds` is as in DeadlineExceeded."""

    worker: str
    timeout_seconds: float
    late_seconds: int = 0

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} at {self.address} answers, and nothing could be read from its worker "
            f"{self.worker} within {self.timeout_seconds:g} s{and_stood_still(self.late_seconds)}"
        )


class HandshakeMalformed(PeerFailure, frozen=True, kw_only=True):
    """Something else listens there, or the reply could not be decoded within the bounds of the wire format."""

    field: str
    detail: str

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} at {self.address} sent a malformed handshake ({self.field}: {self.detail}); "
            "something other than a NIXL connector may listen there, or its version differs"
        )


class HandshakeRefused(PeerFailure, frozen=True, kw_only=True):
    """The peer answered with an error or ended the connection instead, or our NIXL agent refused its metadata."""

    detail: str

    def __str__(self) -> str:
        return f"handshake with prefill engine {self.peer} at {self.address} was refused: {self.detail}"


class PreviousReadsInFlight(PeerFailure, frozen=True, kw_only=True):
    """READs over an earlier connection to the same process have not ended. Its NIXL agent has to be removed before it
    can be added again, and is not while a READ may still write."""

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} at {self.address} answers, and cannot be connected: READs of the previous "
            "connection to it have not ended"
        )


class NotAllowed(PeerFailure, frozen=True, kw_only=True):
    """One of the two engines does not let the other one in: an address range or a key. `detail` says which."""

    detail: str

    def __str__(self) -> str:
        return f"prefill engine {self.peer} at {self.address} and this one may not speak to each other: {self.detail}"


class WrongEngine(PeerFailure, frozen=True, kw_only=True):
    """Another engine answers at the address that the request names."""

    found: str

    def __str__(self) -> str:
        return (
            f"expected prefill engine {self.peer} at {self.address}, found engine {self.found}: the engine was "
            "replaced, or two engines share an address"
        )


class Incompatible(PeerFailure, frozen=True, kw_only=True):
    """The two engines cannot exchange KV. Both sides' values of the field that differs, and what to do about it."""

    field: str
    local: str
    remote: str
    advice: str

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} at {self.address} is incompatible: {self.field} is {self.remote} there and "
            f"{self.local} here{ADVICE_FOLLOWS}{self.advice}"
        )


class PeerBackoff(PeerFailure, frozen=True, kw_only=True):
    """The peer failed a moment ago and is not tried again yet. `last` is the kind of the failure before."""

    retry_in_seconds: float
    last: str

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} at {self.address} failed recently ({self.last}); next attempt in "
            f"{self.retry_in_seconds:.1f} s"
        )


class PeerRetired(PeerFailure, frozen=True, kw_only=True):
    """Another engine has taken the address of this one, it was evicted, or the connector stops."""

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} was given up: another engine answers at its address, or it was evicted as idle"
        )


class PeerLeaving(PeerFailure, frozen=True, kw_only=True):
    """The peer had said that it would end, and its connection has ended since. `detail` is the kind of what showed
    it."""

    detail: str = ""

    def __str__(self) -> str:
        shown = f" ({self.detail})" if self.detail else ""
        where = f"prefill engine {self.peer} at {self.address}"
        return f"{where} was taken away or put to sleep, as it had said that it would be{shown}"


class BlocksConsumed(PeerFailure, frozen=True, kw_only=True):
    """This engine has told the peer that it may free these blocks: an earlier request that named them has failed, was
    aborted or refused, or has read them."""

    remote_request_id: str

    def __str__(self) -> str:
        return (
            f"the blocks of {self.remote_request_id} on prefill engine {self.peer} were released by an earlier request "
            "with the same kv_transfer_params, which has failed, was aborted or refused, or has read them"
        )


class TooManyPeers(PeerFailure, frozen=True, kw_only=True):
    """The cap on known remote engines is reached and none can be evicted."""

    limit: int

    def __str__(self) -> str:
        return f"cannot track prefill engine {self.peer}: {self.limit} remote engines are in use already"


class TransferError(PeerFailure, frozen=True, kw_only=True):
    """NIXL reported an error for a READ or refused to start one.

    `transport_lost` is true when the error says that the connection to the peer is gone, so that every other
    transfer to it will fail too until its agent is removed and added again (docs/nixl.md facts 7 and 8).
    """

    operation: str
    error: str
    transport_lost: bool

    def __str__(self) -> str:
        return f"NIXL {self.operation} with prefill engine {self.peer} failed: {self.error}" + (
            "; the connection is rebuilt on the next request" if self.transport_lost else ""
        )


def is_transport_lost(failure: Failure | None) -> bool:
    """Whether the connection to the peer is gone with it, and another one may do better."""
    return isinstance(failure, TransferError) and failure.transport_lost


class BadParams(Failure, frozen=True, kw_only=True):
    """`kv_transfer_params` of a request is malformed. `found` is a bounded rendering of the offending value."""

    field: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"kv_transfer_params.{self.field}: expected {self.expected}, found {self.found}"


class ParamsForged(Failure, frozen=True, kw_only=True):
    """`kv_transfer_params` does not carry a signature of this fleet. `why` says what is wrong with it; `source`: whose
    blocks they name, which nobody vouches for."""

    why: str
    source: str

    def __str__(self) -> str:
        return (
            f"no engine of this fleet has given these kv_transfer_params out ({self.why}), which name {self.source}; "
            "they were made or changed on the way, or the engine that lends has other keys (params_keys_file)"
        )


class WrongPrompt(Failure, frozen=True, kw_only=True):
    """`kv_transfer_params` of a request were given out for another prompt, or for another adapter.

    `lent_tokens`: whose KV they name; 0: they do not say. `source`: of which request on which engine. `tokens`: of this
    request's prompt.
    """

    lent_tokens: int
    source: str
    tokens: int

    def __str__(self) -> str:
        return (
            "these kv_transfer_params were given out for another prompt or adapter: the KV that they name, of "
            f"{self.lent_tokens} tokens of {self.source}, is not of what this request of {self.tokens} tokens begins "
            "with"
        )


ParamsFailure: TypeAlias = BadParams | ParamsForged | WrongPrompt | Incompatible
"""Why nothing is read for a request, whatever its engine would say."""


class LeaseOver(PeerFailure, frozen=True, kw_only=True):
    """P does not keep the blocks any more. `why` is P's word for it, bounded by the wire.

    `address` is where P was connected, and `named` where the request says that it is, if that is elsewhere: an engine
    is told from others by its id alone.
    """

    remote_request_id: str
    why: str
    named: str = ""

    def __str__(self) -> str:
        at = f" at {self.address}" if self.address else ""
        elsewhere = (
            f", and the request names this engine at {self.named}: if another process runs there, both have one "
            "engine_id"
            if self.named
            else ""
        )
        # Before the semicolon, as `why` says no more than that in its first line.
        return (
            f"prefill engine {self.peer}{at} does not keep the blocks of {self.remote_request_id} any more "
            f"({self.why}){elsewhere}; they may hold another request's KV"
        )


class LeaseNotProven(PeerFailure, frozen=True, kw_only=True):
    """All bytes came, and P did not say whether it still kept the blocks by then."""

    remote_request_id: str
    waited_seconds: float

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} did not confirm within {self.waited_seconds:g} s that it kept the blocks of "
            f"{self.remote_request_id} until they were read; they may hold another request's KV"
        )


class Corrupt(PeerFailure, frozen=True, kw_only=True):
    """With the option verify: a block has arrived that is not the one that P has lent. The first one that differs.

    `block` is the number of a kernel block on P, `region` the name of its KV cache region, `differing` of `compared`
    checksums of the READ differ.
    """

    remote_request_id: str
    region: str
    block: int
    differing: int
    compared: int

    def __str__(self) -> str:
        return (
            f"block {self.block} of {self.region} of {self.remote_request_id} has arrived from prefill engine "
            f"{self.peer} with other content than was lent ({self.differing} of {self.compared} checksums differ): a "
            "network card, its driver or memory is faulty on one of the two machines"
        )


class ChecksumsMissing(PeerFailure, frozen=True, kw_only=True):
    """With the option verify: P could make no checksums of what it lent, so it is not read."""

    remote_request_id: str

    def __str__(self) -> str:
        return (
            f"prefill engine {self.peer} has no checksums of the blocks of {self.remote_request_id}, and this engine "
            "reads none that it cannot verify"
        )


class LeaseExpired(Failure, frozen=True, kw_only=True):
    """On P: a lease has ended, and not because its readers were done. Its blocks are freed."""

    lent_seconds: float
    blocks: int
    holders: str

    def __str__(self) -> str:
        return (
            f"{self.blocks} block(s) were lent for {self.lent_seconds:.1f} s and not released ({self.holders}); they "
            "are freed"
        )


class DeadlineExceeded(Failure, frozen=True, kw_only=True):
    """The whole request took longer than the option request_timeout_seconds. `phase` is where it was. `late_seconds`:
    how much later than that this rank came to know it; it is whole seconds where the rank itself stood still."""

    timeout_seconds: float
    phase: str
    late_seconds: int = 0

    def __str__(self) -> str:
        return (
            f"the KV transfer did not end within {self.timeout_seconds:g} s (it was {self.phase}"
            f"{and_stood_still(self.late_seconds)})"
        )


class PackingFailed(Failure, frozen=True, kw_only=True):
    """The blocks of a request have arrived, and could not be put in the order of attention on CPUs. It comes after the
    end of the request's machine, whose work it was to bring them here."""

    error: str

    def __str__(self) -> str:
        return f"its KV has arrived, and attention on CPUs could not put it in its own order: {self.error}"


class DeviceMemoryExhausted(Failure, frozen=True, kw_only=True):
    """The blocks of a request have arrived, and the device had not even the memory to put one of them in order, or for
    an index of what is to be zeroed. Like PackingFailed it comes after the end of the request's machine."""

    error: str

    def __str__(self) -> str:
        return f"its KV has arrived, and the device had no memory left for putting it in order: {self.error}"


class AbortedByClient(Failure, frozen=True, kw_only=True):
    """The request was aborted by the engine (client gone, or stopped)."""

    def __str__(self) -> str:
        return "the request was aborted"


class Quarantined(Failure, frozen=True, kw_only=True):
    """READs did not become quiescent: the destination blocks stay out of the pool until they do."""

    reads: int
    waited_seconds: float
    cause: str

    def __str__(self) -> str:
        return (
            f"{self.reads} READ(s) still in flight {self.waited_seconds:g} s after the request ended "
            f"({self.cause}); its destination blocks are kept out of the block pool until they finish"
        )


class QuarantineFull(Failure, frozen=True, kw_only=True):
    """So many blocks of this engine are in quarantine that nothing new is read, from whichever engine, for now."""

    blocks: int
    limit: int

    def __str__(self) -> str:
        return (
            f"{self.blocks} KV blocks of this engine are in quarantine because READs that have not ended may still "
            f"write into them, and the option quarantine_limit allows {self.limit}; nothing is read until some are back"
        )


class RequestIdInQuarantine(Failure, frozen=True, kw_only=True):
    """READs may still write into the blocks of an earlier request of this id, which has ended.

    What is kept of those goes by the id, and vLLM gives an id free with the report.
    """

    blocks: int

    def __str__(self) -> str:
        return (
            f"an earlier request of the same id has ended, and READs may still write into {self.blocks} KV blocks that "
            "are in quarantine for it"
        )


class ActorCrashed(Failure, frozen=True, kw_only=True):
    """A bug: an actor raised. Its requests fail, the actor is started again, the engine goes on."""

    actor: str
    error: str

    def __str__(self) -> str:
        return f"internal error in {self.actor}: {self.error}"


class ConnectorStopped(Failure, frozen=True, kw_only=True):
    """The connector's thread ended; every open request fails and new ones are refused."""

    detail: str

    def __str__(self) -> str:
        return f"the KV connector has stopped ({self.detail})"


class UcxPortClosed(Failure, frozen=True, kw_only=True):
    """UCX of this engine does not listen any more, so it lends nothing; what is connected goes on."""

    detail: str

    def __str__(self) -> str:
        return f"no decode engine can connect any more that has not before, so nothing more is lent ({self.detail})"


class MessageMalformed(Failure, frozen=True, kw_only=True):
    """A message about leases is not one: a notification, or what came on the control socket. It was ignored."""

    sender: str
    detail: str

    def __str__(self) -> str:
        return f"message from {self.sender} is malformed ({self.detail}) and was ignored"


class NotificationsDropped(Failure, frozen=True, kw_only=True):
    """So many notifications waited that further ones were dropped. `dropped`: since the start."""

    dropped: int

    def __str__(self) -> str:
        return (
            f"{self.dropped} notification(s) dropped so far because too many came at once; a lease whose release was "
            "among them ends at its deadline"
        )


class ConnectionCutOff(Failure, frozen=True, kw_only=True):
    """A connection to this engine's control socket was ended: for what came over it, or for want of room."""

    sender: str
    why: str

    def __str__(self) -> str:
        return (
            f"a connection from {self.sender} was ended: {self.why}; its address may be shut out for "
            "half a minute, and an engine connects again when it next tries"
        )


class ConsumerUnknown(Failure, frozen=True, kw_only=True):
    """A release, by a message or a notification, names a request that this engine does not lend, or not any more."""

    sender: str
    request_id: str

    def __str__(self) -> str:
        return f"release from {self.sender} names {self.request_id}, which is not lent here, or not any more; ignored"
