"""A pytest plugin: whoever asks vLLM's factory for `NixlConnector` gets this project's.

Tests that differ on purpose are named, with what they differ in, and have to go on to.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.request import Request

from connector import NixlConnector
from connector.scheduler.prefix_digest import prefix_digests

METADATA = "NixlConnectorMetadata"
SCHEDULER_SIDE = "connector_scheduler"
ITS_CLASS = ", NixlConnector)"
DIFFERENT = {
    # What some look at differs from one version of vLLM to the next.
    "test_abort_p_side_non_length_capped": (SCHEDULER_SIDE, ITS_CLASS),
    "test_build_connector_meta_recv_entries": (METADATA,),
    "test_build_connector_meta_clears_reqs_need_recv": (SCHEDULER_SIDE, ITS_CLASS),
    "test_build_connector_meta_multiple_requests": (METADATA,),
    "test_d_node_request_finished_delays_block_free": (SCHEDULER_SIDE, ITS_CLASS),
    "test_no_double_read_blocks_after_reschedule": (SCHEDULER_SIDE, ITS_CLASS),
    "test_remote_blocks_processed_flag_persists": (SCHEDULER_SIDE, ITS_CLASS),
    "test_prompt_less_than_block_size": (METADATA,),
    "test_abort_immediately_remote_prefill_enqueues_empty_recv": (METADATA,),
    "test_nixl_wins_load_over_cpu_offload": (METADATA,),
}
"""Tests that look into the built-in connector, and at what: the class of what its scheduler side tells its workers,
that side itself, or its own class. All are its own affair."""
OF_THE_BUILTIN_WORKER = frozenset(
    {
        "test_p_node_pull_kv_from_d",
        "test_p_node_pull_then_send_kv",
        "test_p_node_deferred_pull_on_no_handshake",
        "test_turn2_deadline_gate",
        "test_turn2_full_prefix_hit_with_expired_deadline_skips_gate",
        "test_add_new_req_to_recv_populates_remote_meta",
        "test_handshake_listener_appends_perf_counter_frame",
    }
)
"""They make its worker, its metadata or its listener themselves, so nothing is put in its place."""

made: list[type] = []
"""Connectors that were made meanwhile."""
made_in: set[str] = set()
"""Tests that had some made."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    others = [each for each in items if _name_of(each) in OF_THE_BUILTIN_WORKER]
    items[:] = [each for each in items if each not in others]
    config.hook.pytest_deselected(items=others)


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A test that differs has to fail at what it is known for."""
    looked_at = DIFFERENT.get(_name_of(pyfuncitem), ())
    try:
        outcome = yield
    except (AssertionError, AttributeError) as error:
        if not any(each in str(error) for each in looked_at):
            raise
        pytest.xfail(f"looks into the built-in connector: {' or '.join(looked_at)}")
    if looked_at:
        pytest.fail(f"it does not look at {' or '.join(looked_at)} any more: no longer different")
    return outcome


@pytest.fixture(autouse=True)
def in_its_place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def load() -> type:
        made.append(NixlConnector)
        return NixlConnector

    before = len(made)
    monkeypatch.setitem(KVConnectorFactory._registry, "NixlConnector", load)
    _say_what_engines_say(request.module, monkeypatch)
    yield
    if len(made) > before:
        made_in.add(request.node.nodeid)


def _say_what_engines_say(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters as these tests make them lack what every engine says: a list of blocks for each cache group, and in a
    second turn the size of D. This connector refuses what is malformed, and these tests would show nothing but that."""
    if (create := getattr(module, "create_request", None)) is not None:

        def of_groups(*arguments: Any, **more: Any) -> Request:
            asked: Request = create(*arguments, **more)
            if (params := asked.kv_transfer_params) and (block_ids := params.get("remote_block_ids")):
                params["remote_block_ids"] = [block_ids]
            return asked

        monkeypatch.setattr(module, "create_request", of_groups)
    name = "_make_p_node_turn2_request"
    if (make := getattr(module, name, None)) is not None:

        def of_our_decode_engine(*arguments: Any, **more: Any) -> Request:
            """Of a D of this connector: P reads nothing back from one that does not tell what its blocks hold."""
            asked: Request = make(*arguments, **more)
            params = asked.kv_transfer_params
            assert params is not None
            common = min(params["remote_num_tokens"], asked.num_prompt_tokens)
            digests = prefix_digests(asked, [common], media_are_numbered=False)
            params |= {"tp_size": 1, "lease_number": 1, "prefix_digests": [list(each) for each in digests]}
            return asked

        monkeypatch.setattr(module, name, of_our_decode_engine)


def _name_of(item: pytest.Item) -> str:
    return getattr(item, "originalname", None) or item.name


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    passed = {report.nodeid for report in terminalreporter.stats.get("passed", []) if report.when == "call"}
    terminalreporter.write_line(
        f"{len(passed & made_in)} of {len(passed)} tests that passed had this project's connector made, "
        f"{len(made)} times in all"
    )
