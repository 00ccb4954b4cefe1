"""An engine whose ports were chosen (`control_port`, UCX_TCP_PORT_RANGE), and one that wants the same ones."""

from __future__ import annotations

import psutil
import pytest

from tests.integration.house import BLOCK_TOKENS, House, check_loaded
from tests.rig import EngineRig, RigError, prompt
from tests.rig.network import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

UCX_PORTS = range(12_000, 12_200)
"""UCX takes one of them on each network interface."""


def listens_at(engine: EngineRig) -> set[int]:
    connections = psutil.Process(engine.process_id).net_connections("tcp")
    return {each.laddr.port for each in connections if each.status == psutil.CONN_LISTEN}


def test_an_engine_listens_at_the_ports_that_were_chosen(house: House) -> None:
    """So that a firewall can name them. A second engine with the same ones does not start, and names the option."""
    port = free_port()
    options = house.decode.options
    chosen = {
        "extra_config": options.extra_config | {"control_port": port},
        "environment": options.environment | {"UCX_TCP_PORT_RANGE": f"{UCX_PORTS.start}-{UCX_PORTS.stop - 1}"},
    }
    tokens = prompt("chosen", 3 * BLOCK_TOKENS)
    with house.extra_engine(**chosen) as engine:
        engine.wait_ready()
        assert {engine.options.side_channel_port, port} < listens_at(engine)
        assert listens_at(engine) & set(UCX_PORTS)
        check_loaded(house.decode.decode("chosen", tokens, engine.prefill("chosen", tokens)), tokens)
        with house.extra_engine(**chosen) as second:
            with pytest.raises(RigError):
                second.wait_ready()
            log = second.log_path.read_text()
        assert f"option control_port gives this worker the port {port}" in log
        assert "in use" in log
        check_loaded(house.recompute.decode("again", tokens, engine.prefill("again", tokens)), tokens)
        engine.wait_until_whole(20)
