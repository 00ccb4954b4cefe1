"""Where a worker's control socket listens, and that peers are told an address at which it does."""

from __future__ import annotations

import msgspec
import pytest
import trio

from connector.ports.side_channel import Listener, SideChannelError
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.wire.control import HeldLease, Hold, HoldAnswer, decode_answer, decode_request, encode_answer
from connector.wire.control import encode_request as encode_control
from connector.worker import connector_worker
from connector.worker.connector_worker import _open_control_socket
from statemachine.failures import Failure
from statemachine.lease import LeaseName

ELSEWHERE = "203.0.113.7"  # reserved for documentation: nobody's


def _refuse_failure(subject: str, failure: Failure) -> None:
    raise AssertionError(f"{subject}: {failure}")


def opened(monkeypatch: pytest.MonkeyPatch, variable: str, own_address: str = "127.0.0.1") -> HoldAnswer:
    """Open it with VLLM_NIXL_SIDE_CHANNEL_HOST set; the answer to a question at the address that peers are told."""
    monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_HOST", variable)
    monkeypatch.setattr(connector_worker, "get_ip", lambda: own_address)
    # The largest message that there is: as many leases as fit in one, with long names.
    leases = tuple(LeaseName(f"{number:0512d}", 1) for number in range(512))
    asked = Hold(engine_id="d", rank=0, ranks=1, sent_ns=3, leases=leases)

    async def serve(listener: Listener) -> None:
        request = await listener.receive()
        message = decode_request(request.frames_untrusted)
        assert isinstance(message, Hold)
        held = tuple(HeldLease(*lease, remaining_ns=9) for lease in message.leases)
        listener.reply(request.reply_address, encode_answer(HoldAnswer(sent_ns=message.sent_ns, held=held)))

    async def main() -> HoldAnswer:
        channel = ZmqSideChannel()
        try:
            host, listener = _open_control_socket(channel, _refuse_failure)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(serve, listener)
                with trio.fail_after(5):
                    answer = decode_answer(await channel.connect(host, listener.port).ask(encode_control(asked)))
            assert isinstance(answer, HoldAnswer)
            assert len(answer.held) == len(leases)
            return msgspec.structs.replace(answer, held=answer.held[:1])
        finally:
            channel.close()

    return trio.run(main)


@pytest.mark.parametrize("variable", ["127.0.0.1", "localhost", ELSEWHERE])
def test_it_listens_where_peers_are_told(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """A worker on another machine than the scheduler process inherits an address that is not its own."""
    answer = opened(monkeypatch, variable)
    assert answer.sent_ns == 3
    assert answer.held[0].remaining_ns == 9


def test_an_engine_without_an_address_of_its_own_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SideChannelError):
        opened(monkeypatch, ELSEWHERE, own_address=ELSEWHERE)
