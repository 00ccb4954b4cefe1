"""KV that travels through host buffers: bytes on the device of D are those on the device of P.

The first half runs vLLM's engine cores: prompts in chunks that end in the middle of a block, prefix hits, orders of
axes that differ between device and host, and the built-in connector as a decode engine. The second half runs the
connector's workers alone, over real NIXL, with caches of several groups as vLLM lays them out: there every byte of D's
device is accounted for.

The "device" is main memory that is never registered (`tests.rig.accelerator`).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import copy_kv_blocks
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import KVCacheConfig, MambaSpec

from connector.nixl_connector import NixlActorConnector
from connector.protocol import Command, GroupPull, LeaseComputing, LeaseGranted, PeerAddress, StartPull
from connector.step_metadata import HandshakeMetadata, StepMetadata
from connector.worker.host_staging import CopyOperationMissing
from statemachine.lease import LeaseName
from tests.integration.house import BLOCK_TOKENS, LONG_HANDSHAKE, check_loaded
from tests.rig import BUILTIN, OURS, EngineOptions, EngineRig, RequestSpec, free_port, prompt
from tests.rig.accelerator import DEVICE_TYPE, copy_blocks
from tests.rig.listener import make_listener_thread
from tests.unit.cache_families import FAMILIES, make_caches
from tests.unit.vllm_setup import allow_kernel_block_size

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

WAIT_SECONDS = 60.0
LEASE = LeaseName("p", 1)


# --- engines --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engines:
    """All staged. P's device has tokens before heads, and its host buffers heads before tokens, as those of D."""

    prefill: EngineRig
    decode: EngineRig
    builtin_decode: EngineRig


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    shape: dict[str, Any] = {"layers": 2, "blocks": 48, "max_requests": 8, "staged": True}
    chunks: dict[str, Any] = {"max_batched_tokens": BLOCK_TOKENS + BLOCK_TOKENS // 2}
    options = (
        EngineOptions(OURS, "kv_producer", free_port(), layout="LBNHC", permutes=True, **chunks, **shape),
        EngineOptions(OURS, "kv_consumer", free_port(), extra_config=LONG_HANDSHAKE, **shape),
        EngineOptions(BUILTIN, "kv_consumer", free_port(), **shape),
    )
    directory = tmp_path_factory.mktemp("staged")
    with ExitStack() as stack:
        rigs = [stack.enter_context(EngineRig(each, directory)) for each in options]
        for rig in rigs:
            rig.wait_ready()
        yield Engines(*rigs)


@pytest.mark.parametrize("kind", ["decode", "builtin_decode"])
def test_prompts_in_chunks_of_one_and_a_half_blocks(engines: Engines, kind: str) -> None:
    """Several at once, so that their chunks are of all sizes; every byte on the device of D is right."""
    decode: EngineRig = getattr(engines, kind)
    prompts = {f"{kind}-{length}": prompt(f"{kind}-{length}", length) for length in (7, 64, 100, 200)}
    params = engines.prefill.prefill_all(prompts)
    decode.submit(*(RequestSpec(name, tokens, 3, params[name]) for name, tokens in prompts.items()))
    for outcome in decode.wait_all(list(prompts)):
        check_loaded(outcome, prompts[outcome.request_id], 3)
    for engine in (engines.prefill, decode):
        engine.wait_until_whole()


def test_a_prefix_hit_on_the_prefill_engine(engines: Engines) -> None:
    """Of blocks that were computed for a request of P's own, which nobody has copied to the host."""
    shared = prompt("shared", 3 * BLOCK_TOKENS)
    own, tokens = (prompt(name, 4 * BLOCK_TOKENS + 5, shared) for name in ("own", "lent"))
    engines.prefill.decode("own", own, None)
    engines.prefill.submit(RequestSpec("lent", tokens, kv_transfer_params={"do_remote_decode": True}))
    outcome = engines.prefill.wait("lent")
    assert outcome.local_cached_tokens == 3 * BLOCK_TOKENS
    check_loaded(engines.decode.decode("lent", tokens, outcome.kv_transfer_params), tokens)
    engines.prefill.wait_until_whole()


def test_a_prefix_hit_on_the_decode_engine(engines: Engines) -> None:
    """The blocks of the hit are not read, and what the host has in their place does not reach the device."""
    shared = prompt("hit", 2 * BLOCK_TOKENS)
    first, second = (prompt(name, 3 * BLOCK_TOKENS + 5, shared) for name in ("first", "second"))
    engines.decode.decode("first", first, None)
    outcome = engines.decode.decode("second", second, engines.prefill.prefill("second", second))
    check_loaded(outcome, second)
    assert outcome.local_cached_tokens == 2 * BLOCK_TOKENS
    engines.prefill.wait_until_whole()


def test_an_abort_in_the_middle_of_a_prompt(engines: Engines) -> None:
    """Its blocks are another request's soon, and the host has the bytes of that one."""
    engines.prefill.submit(
        RequestSpec("aborted", prompt("aborted", 600), kv_transfer_params={"do_remote_decode": True})
    )
    engines.prefill.abort("aborted")
    assert engines.prefill.wait("aborted").finish in ("abort", "length")
    engines.prefill.wait_until_whole()
    tokens = prompt("after", 300)
    check_loaded(engines.decode.decode("after", tokens, engines.prefill.prefill("after", tokens)), tokens)
    engines.prefill.wait_until_whole()


# --- workers --------------------------------------------------------------------------------------------------------


class Worker:
    """The worker side of an engine: its KV cache on the device, filled with noise, and the connector in front of it."""

    def __init__(self, config: VllmConfig, monkeypatch: pytest.MonkeyPatch, engine_id: str, kind: Kind) -> None:
        specs = FAMILIES[kind.family](1, kind.block_tokens)
        self.caches, self.device = make_caches(config, monkeypatch, specs, kernel_block_tokens=kind.kernel_block_tokens)
        self._noise = torch.Generator().manual_seed(len(engine_id))
        self.memory.copy_(torch.randint(0, 256, self.memory.shape, dtype=torch.uint8, generator=self._noise))
        config = copy.copy(config)
        config.kv_transfer_config = copy.copy(config.kv_transfer_config)
        config.kv_transfer_config.engine_id = engine_id
        config.kv_transfer_config.kv_connector_extra_config = LONG_HANDSHAKE
        config.kv_transfer_config.kv_buffer_device = "cpu" if kind.staged else DEVICE_TYPE
        self.connector = NixlActorConnector(config, KVConnectorRole.WORKER, self.caches)

    @property
    def memory(self) -> torch.Tensor:
        """All of the device's, as bytes."""
        storage = next(iter(self.device.values())).untyped_storage()
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    def step(self, *commands: Command, saves: tuple[list[int], ...] = ()) -> set[str]:
        """What vLLM's worker does with a connector in a step; the requests that are reported as loaded."""
        self.connector.bind_connector_metadata(StepMetadata(list(commands), saves))
        self.connector.start_load_kv(None)  # type: ignore[arg-type]
        self.connector.wait_for_save()
        results = self.connector.get_transfer_results(set())
        self.connector.clear_connector_metadata()
        assert not results.failed_recving
        return results.finished_recving

    def pages(self, layer: str, block: int) -> torch.Tensor:
        """A logical block of a layer on the device, as bytes [kernel blocks, heads, tokens, content]."""
        cache = self.device[layer]
        ratio = cache.shape[0] // self.caches.num_blocks
        return cache.view(torch.uint8)[block * ratio : (block + 1) * ratio]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A family of `cache_families`."""

    family: str
    shares: bool = False
    """Layers of several groups lie in the same memory."""
    staged: bool = True
    """False: NIXL gets the device's own memory."""
    block_tokens: int = 64
    kernel_block_tokens: int | None = None


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current_platform, "device_type", DEVICE_TYPE)
    for name in ("insert_blocks_to_device", "swap_out_blocks_to_host"):
        monkeypatch.setattr(current_platform, name, copy_blocks, raising=False)


@contextmanager
def workers(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, prefill_kind: Kind, decode_kind: Kind
) -> Iterator[tuple[Worker, Worker, PeerAddress]]:
    """P and D, ready, and where P is."""
    prefill, decode = Worker(config, monkeypatch, "p", prefill_kind), Worker(config, monkeypatch, "decode", decode_kind)
    with ExitStack() as stack:
        for worker in (prefill, decode):
            stack.callback(worker.connector.shutdown)
            worker.connector.register_kv_caches(worker.device)
            worker.connector.set_host_xfer_buffer_ops(copy_kv_blocks)
        metadata = prefill.connector.get_handshake_metadata()
        assert isinstance(metadata, HandshakeMetadata)
        address = PeerAddress(engine_id="p", host="127.0.0.1", port=free_port(), tp_size=1)
        listener = make_listener_thread(address.host, address.port, {(0, 0): metadata})
        stack.callback(listener.stop)
        listener.start()
        yield prefill, decode, address


def _pull(peer: PeerAddress, ours: Sequence[list[int]], theirs: Sequence[list[int]], tokens: int) -> StartPull:
    return StartPull(
        request_id="d",
        lease=LEASE,
        peer=peer,
        groups=tuple(
            GroupPull(local_block_ids=local, local_first=0, remote_block_ids=remote)
            for local, remote in zip(ours, theirs, strict=True)
        ),
        num_tokens=tokens,
        remote_num_tokens=tokens,
        age_seconds=0.0,
    )


def _lend(prefill: Worker, blocks: tuple[list[int], ...]) -> None:
    prefill.step(LeaseComputing(lease=LEASE), saves=blocks)
    prefill.step(LeaseGranted(lease=LEASE, blocks=sum(map(len, blocks))))


def _load(decode: Worker, pull: StartPull, *, is_staged: bool = True) -> None:
    """Steps until the request is reported; staged, its blocks on the device are as they were up to then."""
    before = decode.memory.clone()
    deadline = time.monotonic() + WAIT_SECONDS
    loaded = decode.step(pull)
    while not loaded:
        assert not is_staged or torch.equal(decode.memory, before), "copied before it was reported"
        assert time.monotonic() < deadline
        time.sleep(0.001)
        loaded = decode.step()
    assert loaded == {"d"}


def _tables(caches: KVCacheConfig, first: int, blocks_of_tokens: int) -> tuple[list[int], ...]:
    """Blocks of each group of a request, no two of them the same; a state is one block."""
    free = iter(range(first, caches.num_blocks))
    return tuple(
        [next(free) for _ in range(1 if isinstance(group.kv_cache_spec, MambaSpec) else blocks_of_tokens)]
        for group in caches.kv_cache_groups
    )


KINDS = {
    "full attention": Kind(family="full attention"),
    "two kernel blocks per block": Kind(family="full attention", kernel_block_tokens=32),
    "groups that share tensors": Kind(family="sliding window", shares=True),
    "states in the pages of attention": Kind(family="mamba 2", shares=True),
    "latent": Kind(family="latent"),
    "several head sizes": Kind(family="several head sizes"),
}


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("name", KINDS)
def test_the_blocks_of_a_request_arrive_and_nothing_else_changes(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind = KINDS[name]
    if kind.kernel_block_tokens is not None:
        allow_kernel_block_size(monkeypatch, kind.kernel_block_tokens)
    with workers(config, monkeypatch, kind, kind) as (prefill, decode, address):
        addresses = {cache.data_ptr() for cache in decode.device.values()}
        assert (len(addresses) < len(decode.device)) is kind.shares
        _expect_transfer(prefill, decode, address, kind, is_staged=True)


@pytest.mark.usefixtures("accelerator")
@pytest.mark.parametrize("prefill_is_staged", [True, False])
def test_engines_with_and_without_host_buffers(
    config: VllmConfig, monkeypatch: pytest.MonkeyPatch, prefill_is_staged: bool
) -> None:
    staged, plain = (Kind(family="full attention", staged=staged) for staged in (True, False))
    kinds = (staged, plain) if prefill_is_staged else (plain, staged)
    with workers(config, monkeypatch, *kinds) as (prefill, decode, address):
        assert prefill.connector._worker_side.is_staged is prefill_is_staged
        _expect_transfer(prefill, decode, address, staged, is_staged=not prefill_is_staged)


def _expect_transfer(prefill: Worker, decode: Worker, address: PeerAddress, kind: Kind, *, is_staged: bool) -> None:
    theirs, ours = _tables(prefill.caches, 1, 2), tuple(ids[::-1] for ids in _tables(decode.caches, 2, 2))
    before = decode.memory.clone()
    _lend(prefill, theirs)
    _load(decode, _pull(address, ours, theirs, 2 * kind.block_tokens), is_staged=is_staged)
    found = decode.memory.clone()
    decode.memory.copy_(before)
    for group, local, remote in zip(decode.caches.kv_cache_groups, ours, theirs, strict=True):
        for layer in group.layer_names:
            for to, source in zip(local, remote, strict=True):
                decode.pages(layer, to).copy_(prefill.pages(layer, source))
    assert not torch.equal(found, before)
    assert torch.equal(found, decode.memory)


@pytest.mark.usefixtures("accelerator")
def test_what_no_read_has_written_is_zero_on_the_device(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """P has three blocks of 32 tokens for what are two blocks of 64 on D."""
    prefill_kind, decode_kind = (Kind(family="latent", block_tokens=tokens) for tokens in (32, 64))
    with workers(config, monkeypatch, prefill_kind, decode_kind) as (prefill, decode, address):
        _lend(prefill, ([1, 2, 3],))
        _load(decode, _pull(address, [[5, 4]], [[1, 2, 3]], 96))
        for layer in decode.device:
            sent = torch.cat([prefill.pages(layer, block) for block in (1, 2, 3)], dim=2)
            arrived = torch.cat([decode.pages(layer, block) for block in (5, 4)], dim=2)
            assert torch.equal(arrived[:, :, :96], sent)
            assert not arrived[:, :, 96:].any()


@pytest.mark.usefixtures("accelerator")
def test_a_copy_operation_is_required(config: VllmConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one a prefill engine would lend what the host happens to hold."""
    worker = Worker(config, monkeypatch, "p", Kind(family="full attention"))
    try:
        worker.connector.register_kv_caches(worker.device)
        worker.step()
        with pytest.raises(CopyOperationMissing, match="set_host_xfer_buffer_ops"):
            worker.step(LeaseComputing(lease=LEASE))
    finally:
        worker.connector.shutdown()
