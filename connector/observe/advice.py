"""What to do about each kind of failure, in one line, for the log and `nixl-actor`.

docs/operations/failures.md has more room.

The sentence of a failure says what happened; this stands beside it. One failure, `Incompatible`, brings its own with
its sentence. `advice_of` knows that of a failure, and `told` of what traces and tools have of one.
"""

from __future__ import annotations

import re
import shlex

from connector.wire.bounded import IDENTIFIER_PART_PATTERN
from statemachine.failures import ADVICE_FOLLOWS, Failure, Incompatible

NO_PARAMETERS = "NoTransferParams"
"""Kind of a request that came without parameters. Not a failure: its client got the right answer, later."""
NO_ROOM = "NoRoom"
"""A request that does not fit into the cache beside the blocks that are kept from the pool."""
ALREADY_READ = "AlreadyRead"
"""Kind of a request of which nothing was read, because others had read what its parameters name. Not a failure."""
FREED_ON_P = "FreedOnP"
"""Kind of a request of which nothing was read, because P had freed a part of it. Not a failure."""
OTHER_ADAPTER = "OtherAdapter"
"""Kind of a request of which nothing was read, because P had other weights under its adapter's name. Not a failure."""
OTHER_MEDIA = "OtherMedia"
"""Kind of a request of which nothing was read, because P had computed other images or sound in the places of the same
tokens. Not a failure: its client got the right answer, later."""
NOT_READ = "NotRead"
"""Kind of a lease that D held and let go of without a READ. Not a failure: D had no use for it, or none any more."""

NIXL_HANGS = (
    "NIXL has not returned from a call for %.0f s: a driver or a device of this machine hangs. Until it does no READ "
    "begins or is seen to end, whichever engine it is from, and requests fail as if all of those hung "
    "(DeadlineExceeded, Quarantined)"
)
"""What is said of such a worker, with the seconds. The failures that follow name prefill engines, which have nothing to
do with it."""
NIXL_HANGS_ADVICE = (
    "`py-spy dump --pid PID` of that worker shows where its thread nixl-... is; keep the output, and restart the "
    "engine if this does not end"
)

TRACE_INTERRUPTED_ADVICE = (
    "free space, make the directory again, raise the limit of open files (ulimit -n) or of a file's size (ulimit -f), "
    "or have the file system take files again, whichever the error names; an engine that is to use another "
    "trace_directory has to be started again"
)

WHAT_TO_DO: dict[str, str] = {
    # What happens to a tool as well, which may have been given the address of a decode engine, names neither P nor D.
    "AddressNotResolved": (
        "correct the name (VLLM_NIXL_SIDE_CHANNEL_HOST on that engine), or the name service of this machine (is a "
        "server in its /etc/resolv.conf silent?)"
    ),
    "ConnectionRefused": (
        "start that engine again if it has ended; else correct the address: VLLM_NIXL_SIDE_CHANNEL_HOST on it, and "
        "_PORT plus the number of its data-parallel engine"
    ),
    "NoDescriptorLeft": (
        "raise the hard limit of descriptors for this engine (`ulimit -Hn`), or see who uses them up "
        "(ls -l /proc/PID/fd of the worker); the prefill engine has nothing to do with it"
    ),
    "HandshakeTimeout": (
        "see whether that engine runs or hangs, and whether VLLM_NIXL_SIDE_CHANNEL_HOST on it names an address that "
        "can be reached from here"
    ),
    "FirstReadNeverEnded": (
        "see whether a firewall closes ports of UCX (UCX_TCP_PORT_RANGE) in one direction, or UCX of either engine has "
        "chosen a network that does not lead to the other (UCX_NET_DEVICES); else, whether that worker hangs"
    ),
    "HandshakeMalformed": (
        "check that the port is that of a side channel and not of another server, and the versions; does the log of "
        "that engine say that it has shut this address out? Or has it ended, behind a proxy as of a service mesh?"
    ),
    "HandshakeRefused": (
        "the line says why; if it names UCX's port, see whether engines reach each other's ports of UCX in both "
        "directions (UCX_TCP_PORT_RANGE), and whether UCX_TLS and UCX_NET_DEVICES leave both one network; if a worker "
        "of P has died, restart P; if P has ended the connection, see whether it has just ended, or raise its hard "
        "limit of descriptors (ulimit -Hn)"
    ),
    "PreviousReadsInFlight": (
        "wait, if P was stopped or the network was away: over TCP they end two minutes after it is back at the latest, "
        "and P is connected then; else see whether any READ between the two engines gets through (nixl-actor ps)"
    ),
    "NotAllowed": (
        "compare allowed_peers and curve_directory of both engines; does each have the other's public key? "
        "(docs/operations/security.md)"
    ),
    "WrongEngine": (
        "give each engine an address of its own (is VLLM_NIXL_SIDE_CHANNEL_HOST still localhost?); if P was replaced, "
        "prefill again"
    ),
    "ControlLinkLost": (
        "see whether P's worker died, hangs or has no file descriptor left (ulimit -n; its log says so), or its engine "
        "sleeps, and whether D can reach its port; it is connected again by itself"
    ),
    "PeerSilent": "see whether P hangs or is stopped, or the network to it; it is connected again once it answers",
    "RegistrationReplaced": "nothing to do: it is connected again by itself",
    "ReadNeverEnded": (
        "see whether P hangs, or the network between P and D, or whether a firewall closes ports of UCX "
        "(UCX_TCP_PORT_RANGE) in one direction; its blocks come back when the READs end"
    ),
    "PeerBackoff": "correct what the last attempt failed for, which the line names; it is tried again by itself",
    "PeerRetired": "prefill again: the engine that lent these blocks was replaced or forgotten",
    "PeerLeaving": (
        "prefill again; end P only when it says that it has drained (nixl-actor drain), and raise drain_grace_seconds "
        "on it if that comes too late; if P sleeps (/is_sleeping), its leases had ended before: raise "
        "kv_lease_duration if requests are to come so late"
    ),
    "TooManyPeers": "raise the option peer_limit on D",
    "Incompatible": "start both engines alike; the line of each failure says how",
    "BadParams": "have the router forward kv_transfer_params of P's answer unchanged",
    "ParamsForged": (
        "have the router forward kv_transfer_params of P's answer unchanged, and give P and D the same keys "
        "(params_keys_file); else somebody forges them"
    ),
    "WrongPrompt": (
        "have the router prefill each prompt by itself, and hand kv_transfer_params to no other; a call with several "
        "prompts, a tokenizer or chat template that differs, one that writes the date, at midnight or where P and D "
        "are in different time zones (nixl-actor doctor), an adapter of another name, or a prompt that is cut where "
        "--max-model-len differs makes another prompt of it"
    ),
    "BlocksConsumed": "have the router prefill a repeated request again: kv_transfer_params can be used once",
    "LeaseOver": (
        "prefill again, and nothing else if P was restarted; where its readers have released it, have the router use "
        "kv_transfer_params once; raise lease_limit_seconds or kv_lease_duration if requests wait longer than these in "
        "D's queue, as while D sleeps, else see whether D has stood still; if it is all requests of one engine, see "
        "with nixl-actor doctor and the addresses of all prefill engines whether another has the same engine_id"
    ),
    "LeaseNotProven": "see whether P's worker hangs, and whether D can reach its control socket",
    "ChecksumsMissing": "P's log says why (checksums); if its device lacks memory, lower gpu_memory_utilization there",
    "Corrupt": "take P's and D's machines out of service one by one: a network card, driver or memory corrupts data",
    "PackingFailed": "report it with the log of D; with enforce_handshake_compat true on D no P on GPUs is read from",
    "DeviceMemoryExhausted": (
        "lower gpu_memory_utilization on D; see what else takes memory of the device, or of the host where the error "
        "names an allocator of the CPU (ulimit -v, vm.overcommit_memory)"
    ),
    "TransferError": "look at the NIXL error in the log; a connection that is lost is rebuilt on the next request",
    "DeadlineExceeded": (
        "see whether P hangs, or, where the line says that this engine stood still, what stopped that one; raise "
        "request_timeout_seconds if transfers are only slow"
    ),
    "Quarantined": (
        "see with nixl-actor doctor whether NIXL hangs on D itself, then whether P hangs, or the network between them; "
        "restart the one that does, D last"
    ),
    "QuarantineFull": (
        "see `nixl-actor ps` for the engines whose READs do not end, and restart these; or restart this engine"
    ),
    "RequestIdInQuarantine": (
        "send each request with an id of its own: retries, too, and unset VLLM_DISABLE_REQUEST_ID_RANDOMIZATION, with "
        "which vLLM adds nothing of its own to ids"
    ),
    "AbortedByClient": "nothing: the client went away",
    "ConsumerUnknown": (
        "nothing, if that is a decode engine with this connector: it came after the lease had expired, or from before "
        "this P slept or was restarted; else see who sends releases to this P; it is not disturbed"
    ),
    "MessageMalformed": "see who sends this to P, and the versions of both; P is not disturbed",
    "ConnectionCutOff": "see who that is; a firewall keeps out who has no business at the side channel",
    "NotificationsDropped": "see who floods P with notifications; leases that they were to end expire",
    "ConnectorStopped": "restart this engine, and report what its log says",
    "UcxPortClosed": (
        "restart this engine, and raise the hard limit of descriptors (`ulimit -Hn`), or see who uses them up "
        "(ls -l /proc/PID/fd of the worker)"
    ),
    "ActorCrashed": "report it with the log and the trace: it is a bug",
    NO_PARAMETERS: (
        "have the router put kv_transfer_params of P's answer, unchanged, into what it sends to D; a P that drains or "
        "has stopped answers without them"
    ),
    ALREADY_READ: (
        "nothing where it was a sample (n) or a later turn; otherwise have the router prefill a repeated request "
        "again: kv_transfer_params can be used once"
    ),
    FREED_ON_P: "nothing: see docs/limits.md (caches and layouts); a P with this connector keeps what D needs",
    OTHER_ADAPTER: "load the same adapter on all engines, or give new weights a new name",
    OTHER_MEDIA: (
        "have the router send each request with the kv_transfer_params of its own prefill, and images by the same "
        "names (uuid) to both engines"
    ),
    NO_ROOM: (
        "restart the engines whose READs do not end (nixl-actor ps names them), or this engine; what is lent back "
        "(bidirectional_kv_xfer) comes back by itself"
    ),
    "LeaseExpired": (
        "see whether the decode engine that held it has ended or hangs; if none did, whether the router sent it to one "
        "with kv_transfer_params, and how long it waits there; raise kv_lease_duration, or, if it was renewed until "
        "its limit, lease_limit_seconds; of what a decode engine lends back, decoder_kv_blocks_ttl"
    ),
    NOT_READ: (
        "look for what the client was answered: a 400, as where --max-model-len is smaller on D? If it left and should "
        "not have, see for how long requests wait in vLLM's queue on D"
    ),
}
"""By kind; complete for `statemachine/failures.py`."""


def advice_of(failure: Failure) -> str:
    """What to do about this one."""
    return failure.advice if isinstance(failure, Incompatible) else WHAT_TO_DO[failure.kind]


NAMED_LENGTH_MAX = 200
"""Characters of an id in a command."""
_NAMED = re.compile(IDENTIFIER_PART_PATTERN)


def why_command(request_id: str) -> str:
    """The command that says more of a request, to be pasted into a shell. Of an id that is long, or has characters that
    no line of a log takes, it names a part, which is enough; the dots of an id that is cut would be part of no id."""
    found = _NAMED.search(request_id)
    return f"nixl-actor why {shlex.quote(found[0][:NAMED_LENGTH_MAX] if found is not None else '')}"


def named(kind: str | None, sentence: str) -> str:
    """A sentence behind the kind of the failure that it is about, if that has one."""
    return f"{kind}: {sentence}" if kind else sentence


def told(kind: str | None, sentence: str | None, otherwise: str = "") -> tuple[str | None, str]:
    """What happened and what to do, of a failure that another process or a file tells by its kind and its sentence.

    The sentence is cut where it brings its own advice, so that both can be shown without saying anything twice.
    `otherwise`: where nobody knows what to do.
    """
    if kind == Incompatible.__name__ and sentence is not None:
        happened, follows, advice = sentence.rpartition(ADVICE_FOLLOWS)
        if follows:  # a very long one comes without its end
            return happened, advice
    return sentence, WHAT_TO_DO.get(kind or "", otherwise)


def whereabouts(address: str, *, is_connected: bool) -> str:
    """Where a decode engine is that holds a lease, in words; empty: nobody knows. One that lives connects again by
    itself."""
    return address if is_connected or not address else f"{address}, not connected any more"
