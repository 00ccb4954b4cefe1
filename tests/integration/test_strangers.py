"""What somebody can do who is no engine of ours: notifications from strangers, requests with odd names; and what a
prefill engine does that cannot serve any more."""

from __future__ import annotations

import itertools
import resource
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import trio
import zmq

from connector.ports.zmq_bridge import ZmqSideChannel
from connector.wire.handshake import decode_reply, encode_request
from tests.actors.stranger import stranger
from tests.conformance.ucx import in_version, listens, names
from tests.integration.house import (
    BLOCK_TOKENS,
    LEASE_SECONDS,
    MAX_BATCHED_TOKENS,
    House,
    check_loaded,
    check_not_loaded,
)
from tests.rig import EngineRig, RequestSpec, expected_output, prompt
from tests.rig.facts import NO_IDENTITY
from tests.rig.messages import Forward

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

_TOLERANCE = 10.0
WISH = {"do_remote_decode": True, "do_remote_prefill": False}


def agent_metadata(engine: EngineRig) -> bytes:
    """What the engine's side channel says to anybody who asks."""
    port = engine.options.side_channel_port

    async def main() -> bytes:
        channel = ZmqSideChannel()
        try:
            with trio.fail_after(10.0):
                frames = await channel.connect("127.0.0.1", port).ask([encode_request(0, 0)])
        finally:
            channel.close()
        reply = decode_reply(
            frames,
            peer=engine.options.engine_id,
            address=f"127.0.0.1:{port}",
            expected_hash=None,
            identity=NO_IDENTITY,
        )
        return bytes(reply.metadata.agent_metadata)

    return trio.run(main)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _TOLERANCE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


NAMES = {"two bytes": b"\xff\xfe", "in text": b"stranger-\xc3(", "long": b"\x80" * 60}


@pytest.mark.parametrize("kind", NAMES)
def test_a_sender_whose_name_is_not_text_harms_nobody(house: House, kind: str) -> None:
    """Scenario 72. What arrives in the same poll as the first of its notifications is lost, which is logged; everything
    after that is heard, and the engine goes on serving."""
    with house.extra_engine() as engine:
        engine.wait_ready()
        lent = f"lent beside {kind}"
        tokens = prompt(lent, 2 * BLOCK_TOKENS)
        metadata = agent_metadata(engine)
        with stranger(NAMES[kind]) as bad, stranger() as good:

            def progress_until(is_reached: Callable[[], bool]) -> None:
                deadline = time.monotonic() + _TOLERANCE
                while not is_reached():
                    assert time.monotonic() < deadline
                    bad.progress()
                    good.progress()
                    time.sleep(0.01)

            peers = {each: each.meet(metadata) for each in (bad, good)}
            bad.notify(peers[bad], b"HB:x")
            progress_until(lambda: "is not UTF-8" in engine.log_path.read_text())
            engine.prefill(lent, tokens)  # the agents are made, and its time has only begun
            for each, message in ((bad, b"HB:x"), (good, f"{lent}:1".encode()), (bad, b"HB:y")):
                each.notify(peers[each], message)
            progress_until(lambda: not engine.snapshot().requests)
        after = f"after {kind}"
        tokens = prompt(after, 70)
        params = engine.prefill(after, tokens)
        outcome = house.decode.decode(after, tokens, params, 2)
        check_loaded(outcome, tokens, 2)
        engine.wait_until_whole(_TOLERANCE)
        for each in (lent, after):
            house.traces.expect_plain_lease(each)


class Relay(threading.Thread):
    """A side channel that answers as the one behind it does, with other metadata of NIXL. Ends with its process."""

    def __init__(self, port: int, change: Callable[[bytes], bytes]) -> None:
        super().__init__(daemon=True)
        self._behind, self._change = f"tcp://127.0.0.1:{port}", change
        self._zmq = zmq.Context()
        self._router = self._zmq.socket(zmq.ROUTER)
        self.port = self._router.bind_to_random_port("tcp://127.0.0.1")

    def run(self) -> None:
        while True:
            sender, empty, *question = self._router.recv_multipart()
            with self._zmq.socket(zmq.DEALER) as behind:
                behind.connect(self._behind)
                behind.send_multipart([empty, *question])
                _, payload, *rest = behind.recv_multipart()
            answer: dict[str, Any] = msgspec.msgpack.decode(payload)
            metadata = msgspec.msgpack.decode(answer["agent_metadata_bytes"])
            metadata["agent_metadata"] = self._change(metadata["agent_metadata"])
            answer["agent_metadata_bytes"] = msgspec.msgpack.encode(metadata)
            self._router.send_multipart([sender, empty, msgspec.msgpack.encode(answer), *rest])


def test_a_relay_that_changes_one_byte_of_metadata_costs_its_own_request_only(house: House) -> None:
    """Whoever writes kv_transfer_params names the side channel that D asks (docs/nixl.md fact 37)."""
    relay = Relay(house.prefill.options.side_channel_port, lambda metadata: in_version(metadata, 15))
    relay.start()
    with house.extra_engine() as engine:
        engine.wait_ready()
        name, tokens = "by-relay", prompt("by-relay", 70)
        params = {**house.prefill.prefill(name, tokens), "remote_port": relay.port}
        check_not_loaded(engine, engine.decode(name, tokens, params), tokens)
        assert house.traces.reason(name) == "HandshakeRefused"
        assert "its UCX address is of version 15" in engine.log_path.read_text()
        deadline = time.monotonic() + _TOLERANCE
        for number in itertools.count():
            name = f"after-relay-{number}"
            outcome = engine.decode(name, tokens, house.prefill.prefill(name, tokens))
            if outcome.received:
                break
            assert house.traces.reason(name) == "PeerBackoff"
            assert time.monotonic() < deadline
        check_loaded(outcome, tokens)
    house.prefill.wait_until_whole(LEASE_SECONDS + _TOLERANCE)


def test_a_request_that_is_still_computing_cannot_be_freed_by_a_notification(house: House) -> None:
    """Scenario 19. vLLM's scheduler ends the engine core when a request is freed that has not finished. Here the prompt
    is computed to its end. A whole release counts once the lease is granted, so that D is refused and computes; half of
    one leaves D what it came for."""
    with house.extra_engine(forward=Forward.SLEEPS, forward_seconds=0.4) as engine, stranger() as sender:
        engine.wait_ready()
        peer = sender.meet(agent_metadata(engine))
        for name, consumers, then in (("released-early", 1, "done"), ("half-released-early", 2, "held")):
            tokens = prompt(name, 6 * MAX_BATCHED_TOKENS)
            engine.submit(RequestSpec(name, tokens, kv_transfer_params=dict(WISH)))
            house.traces.wait_for_state("lease", name, "computing")
            engine.pause_steps()
            before = engine.snapshot()
            assert before.requests == {name: "RUNNING"}
            for message in (f"{name}:{consumers}", f"{name}:{consumers}", f"HB:{name}"):
                sender.notify(peer, message.encode())
            deadline = time.monotonic() + _TOLERANCE
            while not any(record.event == "ReaderDone" for record in house.traces.records("lease", name)):
                assert time.monotonic() < deadline
                sender.progress()
                time.sleep(0.01)
            engine.resume_steps()
            after = engine.snapshot()
            assert after.requests == {name: "RUNNING"}
            assert after.free_blocks <= before.free_blocks, "freed while it was computing"
            outcome = engine.wait(name)
            assert (outcome.finish, outcome.output_token_ids) == ("length", expected_output(tokens, 1))
            # Otherwise D would hold before the grant, and have the blocks in any case.
            assert house.traces.wait_for_state("lease", name, then) == ["computing", then]
            answered = house.recompute.decode(name, tokens, outcome.kv_transfer_params, 2)
            if then == "held":
                check_loaded(answered, tokens, 2)
            else:
                check_not_loaded(house.recompute, answered, tokens)
                assert house.traces.reason(name) == "LeaseOver"
            engine.wait_until_whole(LEASE_SECONDS + _TOLERANCE)
        name = "after-early-releases"
        tokens = prompt(name, 70)
        check_loaded(house.decode.decode(name, tokens, engine.prefill(name, tokens), 2), tokens, 2)


def test_a_prefill_engine_whose_actors_died_lends_nothing_any_more(house: House) -> None:
    """Scenario 73. It answers without kv_transfer_params, so that D computes the prompt itself; what it lent comes
    back."""
    with house.extra_engine() as engine:
        engine.wait_ready()
        house.expect_loaded(engine, "before-death", prompt("before-death", 70))
        engine.crash_actors()
        deadline = time.monotonic() + _TOLERANCE
        while "transfers no KV any more" not in engine.log_path.read_text():
            assert time.monotonic() < deadline
            engine.decode("step", prompt("step", 10), None)
        answers = {}
        for number in range(4):
            name = f"dead-{number}"
            engine.submit(RequestSpec(name, prompt(name, 70), kv_transfer_params=dict(WISH)))
            outcome = engine.wait(name)
            assert outcome.output_token_ids == expected_output(prompt(name, 70), 1)
            answers[name] = outcome.kv_transfer_params
        # The step in which it dies may still have lent once.
        lent = [name for name, params in answers.items() if params is not None]
        assert lent in ([], ["dead-0"]), f"lent by an engine that cannot serve: {lent}"


def test_a_decode_engine_is_told_at_once_that_the_actors_of_a_prefill_engine_died(house: House) -> None:
    """What was lent before is failed over: by the listener's answer, or by the control socket that was reset."""
    with house.extra_engine() as engine:
        engine.wait_ready()
        tokens = prompt("lent-before-death", 70)
        params = engine.prefill("lent-before-death", tokens)
        engine.crash_actors()
        deadline = time.monotonic() + _TOLERANCE
        while "transfers no KV any more" not in engine.log_path.read_text():
            assert time.monotonic() < deadline
            engine.decode("step", prompt("step", 10), None)
        outcome = house.recompute.decode("lent-before-death", tokens, params, 2)
        assert outcome.output_token_ids == expected_output(tokens, 2)
        assert outcome.receive_failed
        house.expect_failed_by_no_time_limit("lent-before-death")


def test_a_prefill_engine_that_ucx_has_closed_a_port_of_lends_nothing_any_more(house: House) -> None:
    """A connection for which P has no descriptor left (docs/nixl.md fact 38). Who was connected before reads on; others
    are told why they cannot be."""
    with house.extra_engine() as engine:
        engine.wait_ready()
        pid = engine.process_id
        tokens = {name: prompt(name, 70) for name in ("connects", "lent-before", "not-lent")}
        params = {name: engine.prefill(name, tokens[name]) for name in ("connects", "lent-before")}
        check_loaded(house.decode.decode("connects", tokens["connects"], params["connects"], 2), tokens["connects"], 2)
        at = next(each for each in listens(pid) if names(agent_metadata(engine), each[1]))
        soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (3, hard))
        with socket.create_connection(at):
            wait_until(lambda: at not in listens(pid))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
        wait_until(lambda: "UcxPortClosed: connector: no decode engine can connect" in engine.log_path.read_text())
        name = "lent-before"
        check_loaded(house.decode.decode(name, tokens[name], params[name], 2), tokens[name], 2)
        engine.decode("step", prompt("step", 10), None)
        name = "not-lent"
        engine.submit(RequestSpec(name, tokens[name], kv_transfer_params=dict(WISH)))
        assert engine.wait(name).kv_transfer_params is None
        name = "lent-before"
        check_not_loaded(
            house.recompute, house.recompute.decode("refused", tokens[name], params[name], 2), tokens[name]
        )
        assert house.traces.reason("refused") == "HandshakeRefused"
        assert f"UCX has closed its TCP port {at[1]}" in house.recompute.log_path.read_text()
        assert engine.log_path.read_text().count("a worker serves no KV any more") == 1


@pytest.mark.parametrize("name", ["HB:odd", "odd,with,commas", "odd:7"])
def test_requests_with_odd_names_are_lent_and_released(house: House, name: str) -> None:
    tokens = prompt(name, 70)
    params = house.prefill.prefill(name, tokens)
    check_loaded(house.decode.decode(name, tokens, params, 2), tokens, 2)
    house.prefill.wait_until_idle(_TOLERANCE)
    house.traces.expect_plain_lease(name)
