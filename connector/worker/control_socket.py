"""Where the control sockets of an engine's workers listen: at any free port, or at ports that are known beforehand.

With the option `control_port` each rank has the port of its number among all ranks of all data-parallel engines,
counted from there, so that firewalls can name the ports. vLLM counts the ports of side channels likewise: one for each
data-parallel engine.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm import envs
from vllm.utils.network_utils import get_ip

from connector.config import ConnectorOptions, OptionError
from connector.own_address import told_host
from connector.ports.side_channel import Listener, PortUnavailable, SideChannel, SideChannelError
from connector.wire.bounded import PORT_MAX
from connector.wire.control import REQUEST_BYTES_MAX
from connector.worker.parallelism import ranks_of
from statemachine.failures import ConnectionCutOff, Failure

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def require_control_ports(vllm_config: VllmConfig, options: ConnectorOptions) -> None:
    """Raise OptionError, in both processes at start, unless there are such ports and the side channels have others."""
    first = options.control_port
    if not first:
        return
    parallel = vllm_config.parallel_config
    # vLLM sets the size to 1 where the engines know nothing of each other, and leaves the index.
    engines = max(parallel.data_parallel_size, parallel.data_parallel_index + 1)
    ranks = ranks_of(parallel)
    last = first + engines * ranks - 1
    of_whom = f"{engines} data-parallel engines of {ranks} ranks"
    if last > PORT_MAX:
        problem = f"option control_port ({first}) leaves no port to some of {of_whom}: {last} is above {PORT_MAX}"
        raise OptionError("control_port", problem)
    side_channel: int = envs.VLLM_NIXL_SIDE_CHANNEL_PORT
    if first < side_channel + engines and side_channel <= last:
        problem = (
            f"option control_port ({first}) gives the ports {first} to {last} to {of_whom}, and those from "
            f"{side_channel} on are the side channels' (VLLM_NIXL_SIDE_CHANNEL_PORT)"
        )
        raise OptionError("control_port", problem)


def control_port(vllm_config: VllmConfig, options: ConnectorOptions, rank_number: int) -> int:
    """The port of a rank's control socket, by `Placement.number`; 0: any free one."""
    parallel = vllm_config.parallel_config
    if not options.control_port:
        return 0
    return int(options.control_port + parallel.data_parallel_index * ranks_of(parallel) + rank_number)


def listening_host(parallel: ParallelConfig) -> str:
    """Where a worker is to listen: at the address of its engine's side channel, or at its machine's own.

    That address is the scheduler process's. vLLM's Ray executor does not hand the variable on to workers, and on a
    further node of an engine nobody has to set it. Its default, to which only the machine itself can connect, is not
    meant for them.
    """
    may_be_elsewhere = parallel.use_ray or parallel.nnodes > 1
    if may_be_elsewhere and not envs.is_set("VLLM_NIXL_SIDE_CHANNEL_HOST"):
        return str(get_ip())
    return str(envs.VLLM_NIXL_SIDE_CHANNEL_HOST)


def open_control_socket(
    side_channel: SideChannel, host: str, log_failure: Callable[[str, Failure], None], port: int = 0
) -> tuple[str, Listener]:
    """Where this worker's control socket listens, as peers are told, and the socket. `host`: where it is to.

    Raises SideChannelError, and OptionError when the port that was chosen for it cannot be had.
    """

    def listen(host: str) -> Listener:
        return side_channel.listen(
            host,
            port,
            frames_max=1,
            frame_bytes_max=REQUEST_BYTES_MAX,
            on_cut_off=lambda sender, why: log_failure("control socket", ConnectionCutOff(sender=sender, why=why)),
        )

    try:
        try:
            return told_host(host), listen(host)
        except PortUnavailable:
            raise
        except SideChannelError:
            # A worker on another node has no such address.
            host = get_ip()
            return host, listen(host)
    except PortUnavailable as error:
        problem = (
            f"option control_port gives this worker the port {port}, at which it cannot listen on {host} "
            f"({error.error}): is another engine there? Engines on one host need ranges of their own"
        )
        raise OptionError("control_port", problem) from error
