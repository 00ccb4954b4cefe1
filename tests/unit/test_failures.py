"""Failures: each one is data, has a stable kind, and says to people where it happened and what is wrong."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Union

import msgspec
import pytest

from statemachine import failures
from statemachine.failures import Failure, PeerFailure

_PEER = {"peer": "prefill-7", "address": "10.1.2.3:5600"}

EXAMPLES: list[Failure] = [
    failures.HandshakeTimeout(**_PEER, timeout_seconds=5.0),
    failures.HandshakeTimeout(**_PEER, timeout_seconds=5.0, detail="no connection came about", late_seconds=3),
    failures.AddressNotResolved(**_PEER, host="prefill-7.kv", error="Name or service not known"),
    failures.HandshakeMalformed(**_PEER, field="agent_metadata", detail="longer than 4096 bytes"),
    failures.HandshakeRefused(**_PEER, detail="no such rank"),
    failures.PreviousReadsInFlight(**_PEER),
    failures.NotAllowed(**_PEER, detail="it does not let us in"),
    failures.WrongEngine(**_PEER, found="prefill-8"),
    failures.ConnectionRefused(**_PEER),
    failures.NoDescriptorLeft(**_PEER),
    failures.ControlLinkLost(**_PEER, detail="reset by peer"),
    failures.ReadNeverEnded(**_PEER, waited_seconds=30.0),
    failures.FirstReadNeverEnded(**_PEER, worker="PP 0 TP 1", timeout_seconds=5.0, late_seconds=3),
    failures.Incompatible(**_PEER, field="block_size", local="32", remote="64", advice="use one block size"),
    failures.PeerBackoff(**_PEER, retry_in_seconds=2.5, last="HandshakeTimeout"),
    failures.PeerRetired(**_PEER),
    failures.RegistrationReplaced(**_PEER, registration=3),
    failures.PeerSilent(**_PEER, worker="PP 0 TP 1", waited_seconds=30.0),
    failures.PeerLeaving(**_PEER, detail="ControlLinkLost"),
    failures.BlocksConsumed(**_PEER, remote_request_id="cmpl-3"),
    failures.TooManyPeers(**_PEER, limit=1024),
    failures.TransferError(**_PEER, operation="READ", error="REMOTE_DISCONNECT", transport_lost=True),
    failures.BadParams(field="remote_port", expected="int in 1..65535", found="'x'"),
    failures.ParamsForged(why="it is not signed", source="cmpl-3 on prefill-7"),
    failures.WrongPrompt(lent_tokens=100, source="cmpl-3 on prefill-7", tokens=50),
    failures.LeaseOver(**_PEER, remote_request_id="cmpl-3", why="expired", named="10.0.0.8:5600"),
    failures.LeaseNotProven(**_PEER, remote_request_id="cmpl-3", waited_seconds=1.25),
    failures.Corrupt(**_PEER, remote_request_id="cmpl-3", region="model.layers.4", block=71, differing=1, compared=640),
    failures.ChecksumsMissing(**_PEER, remote_request_id="cmpl-3"),
    failures.LeaseExpired(lent_seconds=30.5, blocks=4, holders="held by decode-1"),
    failures.DeadlineExceeded(timeout_seconds=120.0, phase="reading", late_seconds=7),
    failures.PackingFailed(error="RuntimeError('no kernel')"),
    failures.DeviceMemoryExhausted(error="CUDA out of memory"),
    failures.AbortedByClient(),
    failures.Quarantined(reads=3, waited_seconds=30.0, cause="LeaseOver"),
    failures.QuarantineFull(blocks=513, limit=512),
    failures.RequestIdInQuarantine(blocks=3),
    failures.ActorCrashed(actor="peer actor of prefill-7", error="KeyError('x')"),
    failures.ConnectorStopped(detail="engine shutdown"),
    failures.UcxPortClosed(detail="UCX has closed its TCP port 40123"),
    failures.MessageMalformed(sender="decode-1", detail="not UTF-8"),
    failures.NotificationsDropped(dropped=512),
    failures.ConnectionCutOff(sender="10.1.2.9", why="a message without end"),
    failures.ConsumerUnknown(sender="decode-1", request_id="cmpl-3"),
]

UNSPOKEN = {
    # The address of an engine that is named; what concerns it is not its address.
    ("PeerRetired", "address"),
    ("BlocksConsumed", "address"),
    ("TooManyPeers", "address"),
    ("TransferError", "address"),
    ("ControlLinkLost", "address"),
    ("ReadNeverEnded", "address"),
    ("PeerSilent", "address"),
    ("RegistrationReplaced", "address"),
    ("LeaseNotProven", "address"),
    ("Corrupt", "address"),
    ("ChecksumsMissing", "address"),
    # Said in words, see test_a_lost_transport_is_said_in_words.
    ("TransferError", "transport_lost"),
}

PAGE = (Path(__file__).parents[2] / "docs" / "operations" / "failures.md").read_text()

each_failure = pytest.mark.parametrize("failure", EXAMPLES, ids=lambda failure: failure.kind)


def _leaf_types(base: type[Failure]) -> set[type[Failure]]:
    below = base.__subclasses__()
    return {base}.union(*map(_leaf_types, below)) if below else {base}


def test_every_failure_has_an_example_here() -> None:
    abstract = {Failure, PeerFailure}
    assert {type(failure) for failure in EXAMPLES} == _leaf_types(Failure) - abstract


def test_the_page_of_failures_has_every_kind_in_one_row_and_no_other() -> None:
    """In the tables that say what happened and what to do; the first one, of what clients see, names kinds too."""
    rows = re.findall(r"^\|((?: `[A-Z]\w+`,?)+) \|", PAGE, re.MULTILINE)
    named = [kind for row in rows for kind in re.findall(r"`(\w+)`", row)]
    assert sorted(named) == sorted({failure.kind for failure in EXAMPLES})


@each_failure
def test_kind_is_the_name_of_its_type(failure: Failure) -> None:
    assert failure.kind == type(failure).__name__


@each_failure
def test_the_sentence_states_every_fact(failure: Failure) -> None:
    sentence = str(failure)
    assert "Struct" not in sentence
    assert len(sentence) > 15
    assert not sentence.endswith(".")  # sentences are continued by whoever logs them
    for name in failure.__struct_fields__:
        if (failure.kind, name) not in UNSPOKEN:
            value = getattr(failure, name)
            spoken = f"{value:g}" if isinstance(value, float) else str(value)
            assert spoken in sentence, f"{name} is not in: {sentence}"


@each_failure
def test_it_is_frozen_and_comparable(failure: Failure) -> None:
    assert failure == msgspec.structs.replace(failure)
    hash(failure)
    for name in failure.__struct_fields__:
        with pytest.raises(AttributeError):
            setattr(failure, name, None)


@each_failure
def test_it_survives_a_trace_and_comes_back_as_the_same_type(failure: Failure) -> None:
    any_failure: Any = Union[tuple(type(each) for each in EXAMPLES)]  # noqa: UP007 - made at run time
    assert msgspec.json.decode(msgspec.json.encode(failure), type=any_failure) == failure


def test_a_lost_transport_is_said_in_words() -> None:
    lost = failures.TransferError(peer="p", operation="READ", error="x", transport_lost=True)
    kept = msgspec.structs.replace(lost, transport_lost=False)
    assert "the connection is rebuilt" in str(lost)
    assert "rebuilt" not in str(kept)
