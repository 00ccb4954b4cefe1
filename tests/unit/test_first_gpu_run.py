"""docs/first-gpu-run.md: its commands are such that vLLM, its router and this connector take them.

All blocks are put together, and each check is run by bash, with stand-ins for the programs that it starts. They note
how they were called; what they were given goes to the parsers of the real ones.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from vllm import envs
from vllm.benchmarks.serve import add_cli_args
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm_router.launch_router import parse_router_args

from connector.config import parse_options
from connector.environment import TRACE_DIRECTORY_VARIABLE
from tests.unit.serve_arguments import serve_arguments, transfer_config

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "first-gpu-run.md").read_text()
BLOCKS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
FUNCTIONS = "\n".join(BLOCKS[1:])
"""The first block installs things."""
CHECKS = re.findall(r"^(check_\w+)\(\)", FUNCTIONS, re.MULTILINE)
CHECKS_NUMBERED = 10

ENGINE, ROUTER, LOAD = "vllm serve", "vllm-router", "vllm bench serve"
NOTE = """#!/bin/sh
{ env | grep -E '^(VLLM_|CUDA_VISIBLE_DEVICES)'; printf '\\036'; printf '%s\\037' "${0##*/}" "$@"; } \
  > "$CALLS/$(cut -d ' ' -f 22 /proc/$$/stat)-$$-"
"""
"""In a file that is named by when the process was started, and its number: what it notes may be late."""
ANSWERS = """#!/bin/sh
case "$*" in
  *metrics*) echo 'vllm:kv_cache_usage_perc 0'; echo 'vllm:spec_decode_num_accepted_tokens_total 7' ;;
  *"http://${P_AT:-localhost}:8100/"*) echo "${P_SAYS:-$LENDS}" ;;
  *:8100/*) exit 7 ;;
  *) echo "${D_SAYS:-$ANSWERS}" ;;
esac
"""
LENDS = '{"kv_transfer_params": {"tp_size": 1}, "choices": [{"text": "a"}]}'
AN_ANSWER = '{"kv_transfer_params": null, "choices": [{"text": "an answer"}]}'
NO_ANSWER = '{"error": {"message": "the prompt is longer than the model takes", "code": 400}}'
PROFILES = """#!/bin/sh
[ "$1" = profile ] || exit 0
{ printf '\\036'; printf '%s\\037' nsys "$@"; } > "$CALLS/$(cut -d ' ' -f 22 /proc/$$/stat)-$$-nsys"
while [ "$1" != vllm ]; do shift; done
exec "$@"
"""
STAND_INS = {"vllm": NOTE, "vllm-router": NOTE, "curl": ANSWERS, "nsys": PROFILES, "nixl-actor": "#!/bin/sh\n"}
# Of what is done to engines and to time nothing is done; and one prompt is enough.
BEFORE_A_CHECK = """
kill() { [ "$1" != -0 ]; }
sleep() { :; }
seq() { echo 1; }
"""


needs_jq = pytest.mark.skipif(shutil.which("jq") is None, reason="the commands of the page need jq")


class Call(msgspec.Struct, frozen=True):
    """A program that was started."""

    program: str
    arguments: list[str]
    environment: dict[str, str]


@pytest.fixture(scope="module")
def calls(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Call]]:
    """What each check starts."""
    return {check: run(check, tmp_path_factory.mktemp(check)) for check in CHECKS}


def run(check: str, directory: Path) -> list[Call]:
    """What it starts."""
    ended = run_bash(check, directory)
    assert "not found" not in ended.stderr, ended.stderr
    found = []
    for path in sorted((directory / "calls").iterdir(), key=when):
        variables, _, words = path.read_text().partition("\036")
        name, *arguments = words.split("\037")[:-1]
        while arguments and name in ("vllm", "vllm bench"):
            name = f"{name} {arguments.pop(0)}"
        found.append(Call(name, arguments, dict(line.split("=", 1) for line in variables.splitlines())))
    return found


def when(path: Path) -> tuple[int, int, int]:
    """The order in which the shell has started what has written this, and after that what is written by one process."""
    began, number, _ = path.name.split("-")
    return int(began), int(number), path.stat().st_mtime_ns


def run_bash(command: str, directory: Path, **said: str) -> subprocess.CompletedProcess[str]:
    """A command after all blocks of the page. `said`: what engines answer (P_SAYS, D_SAYS)."""
    tools, noted = directory / "bin", directory / "calls"
    tools.mkdir()
    noted.mkdir()
    for name, text in STAND_INS.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    script = (
        FUNCTIONS.replace("/tmp/kv-", f"{directory}/kv-")
        + BEFORE_A_CHECK
        + f"{command}\nstatus=$?; wait; exit $status\n"
    )
    environment = {"PATH": f"{tools}:/usr/bin:/bin", "CALLS": str(noted), "LC_ALL": "C"}
    environment |= {"LENDS": LENDS, "ANSWERS": AN_ANSWER, **said}
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=250)


def started(calls: dict[str, list[Call]], program: str) -> list[Call]:
    return [call for each in calls.values() for call in each if call.program == program]


def extras(call: Call) -> dict[str, Any]:
    """The JSON of an engine's connector."""
    found: dict[str, Any] = json.loads(call.arguments[call.arguments.index("--kv-transfer-config") + 1])
    return found


def test_every_block_is_one_that_bash_can_read() -> None:
    for block in BLOCKS:
        read = subprocess.run(["bash", "-n"], input=block, capture_output=True, text=True)
        assert (read.returncode, read.stderr) == (0, ""), block
    assert len(re.findall(r"^```", PAGE, re.MULTILINE)) == 2 * len(BLOCKS)


def test_the_sanitizer_runs_what_touches_memory_and_keeps_no_device_busy() -> None:
    (selection,) = re.findall(r'-k "(.*)"', BLOCKS[0])
    command = [sys.executable, "-m", "pytest", "tests/gpu", "--collect-only", "-q", "-k", selection]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250).stdout
    names = set(re.findall(r"::(\w+)", found))
    assert names == {
        "test_blocks_are_put_in_order_and_zeroed",
        "test_blocks_that_land_in_the_peers_order_are_put_in_ours",
        "test_the_sums_are_those_of_the_host",
        "test_all_bytes_are_right",
        "test_one_side_on_a_device",
    }


def test_there_are_ten_checks_each_with_what_to_look_for() -> None:
    for number in range(1, CHECKS_NUMBERED + 1):
        assert f"check_{number}" in CHECKS
        (section,) = re.findall(rf"^## {number}\. (.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL)
        words = re.sub(r"^```.*?^```$", "", section, flags=re.MULTILINE | re.DOTALL).partition("\n")[2]
        assert words.strip() or f"check_{number}() {{ pair" in section, "what is right is said with `many`"


@needs_jq
def test_engines_are_given_what_vllm_and_the_connector_take(calls: dict[str, list[Call]]) -> None:
    engines = started(calls, ENGINE)
    assert len(engines) > 2 * CHECKS_NUMBERED
    for call in engines:
        arguments = serve_arguments(call.arguments)
        config = transfer_config(call.arguments)
        parse_options(config.kv_connector_extra_config)
        is_ours = config.kv_connector_module_path == "connector"
        assert is_ours or config.kv_connector_module_path is None
        assert config.kv_connector == "NixlConnector"
        assert config.kv_role == {8100: "kv_producer", 8200: "kv_consumer"}[arguments.port]
        variables = {name for name in call.environment if name.startswith("VLLM_")}
        assert variables <= set(envs.environment_variables)
        devices = call.environment["CUDA_VISIBLE_DEVICES"].split(",")
        assert len(devices) == arguments.tensor_parallel_size * arguments.data_parallel_size


@needs_jq
@pytest.mark.parametrize(
    "said",
    [
        {"D_SAYS": NO_ANSWER},
        {"P_SAYS": NO_ANSWER},
        {"P_SAYS": AN_ANSWER},
        {"D_SAYS": '{"choices": [{"text": ""}]}'},
        {"D_SAYS": '{"choices": [{"text": null}]}'},
        {"D_SAYS": "Internal Server Error"},
    ],
    ids=["D refuses", "P refuses", "P lends nothing", "empty", "null", "no JSON"],
)
def test_two_answers_that_lack_are_not_equal(said: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    ended = run_bash("many", tmp_path / "many", **said)
    assert "no answer to prompt 1\n0 of 64 answers differ, 1 prompts have none" in ended.stdout
    assert ended.returncode == 1
    (tmp_path / "one").mkdir()
    assert "equal" not in run_bash("check_1", tmp_path / "one", **said).stdout.splitlines()


@needs_jq
def test_answers_that_are_there_are_compared(tmp_path: Path) -> None:
    (tmp_path / "many").mkdir()
    ended = run_bash("many", tmp_path / "many")
    assert "0 of 64 answers differ, 0 prompts have none" in ended.stdout
    assert ended.returncode == 0, ended.stderr
    (tmp_path / "one").mkdir()
    assert "equal" in run_bash("check_1", tmp_path / "one").stdout.splitlines()


TABLES = """\
(EngineCore pid=7) [1.2] [vm:7:0]   +--------------------------+-------------------------------------------------+
(EngineCore pid=7) [1.2] [vm:7:0]   | a cfg#0                  | active message by ucp_am_send* from host memory |
(EngineCore pid=7) [1.2] [vm:7:0]   |   0..8184 | short              | tcp/lo  |
(EngineCore pid=7) [1.2] [vm:7:0]   | 8185..inf | multi-frag copy-in | tcp/lo  |
(EngineCore pid=7) [1.2] [vm:7:0]   | a cfg#0 | remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/GPU1 |
(EngineCore pid=7) [1.2] [vm:7:0]   +-----------+--------------------+---------------+
(EngineCore pid=7) [1.2] [vm:7:0]   |   Range   |    Description     |    Config     |
(EngineCore pid=7) [1.2] [vm:7:0]   |   0..4000 | copy-out           | cuda_copy     |
(EngineCore pid=7) [1.2] [vm:7:0]   | 4001..inf | zero-copy          | cuda_ipc/cuda |
(EngineCore pid=7) [1.2] [vm:7:0]   | a cfg#0 | remote memory read by ucp_get*(multi) into host memory from host |
(EngineCore pid=7) [1.2] [vm:7:0]   | 0..inf | zero-copy   | cma/memory |
(EngineCore pid=7) [1.2] [vm:7:0]  ucp_context.c:1 UCX  INFO  transports: tcp cuda_copy cuda_ipc
"""
"""As UCX 1.23 prints them; the one of a device is made after those of main memory."""


def test_of_ucx_tables_that_of_large_reads_into_a_device_is_shown(tmp_path: Path) -> None:
    (tmp_path / "d.log").write_text(TABLES)
    (tmp_path / "run").mkdir()
    ended = run_bash(f"transports {tmp_path}/d.log", tmp_path / "run")
    assert " ".join(ended.stdout.split()) == "1 | 4001..inf | zero-copy | cuda_ipc/cuda |"


def test_prompts_are_as_long_as_the_experts_take() -> None:
    """Where every digit and every blank is a token."""
    (last,) = re.findall(r"LAST=(\d+) MODEL=Qwen", PAGE)
    assert sum(len(f"{number} ") for number in range(1, int(last) + 1)) + 100 < 8192


@needs_jq
def test_each_check_starts_the_pairs_that_it_is_about(calls: dict[str, list[Call]]) -> None:
    def pairs(check: str) -> list[tuple[Call, Call]]:
        engines = [call for call in calls[check] if call.program == ENGINE]
        of_p = [call for call in engines if "8100" in call.arguments]
        of_d = [call for call in engines if "8200" in call.arguments]
        return list(zip(of_p, of_d, strict=True))

    def sizes(check: str, name: str) -> set[tuple[Any, ...]]:
        return {tuple(getattr(serve_arguments(each.arguments), name) for each in pair) for pair in pairs(check)}

    assert sizes("check_5", "tensor_parallel_size") == {(1, 1), (2, 1), (1, 2)}
    assert (16, 64) in sizes("check_5", "block_size")
    layouts = [tuple(each.environment.get("VLLM_KV_CACHE_LAYOUT") for each in pair) for pair in pairs("check_5")]
    assert {("LBNHC", None), (None, "LBNHC")} <= set(layouts)
    permuting = [extras(decode).get("enable_permute_local_kv", False) for _, decode in pairs("check_5")]
    assert permuting == [any(layout) for layout in layouts]
    assert sizes("check_5_experts", "enable_expert_parallel") == {(True, True)}
    assert len(sizes("check_6", "model_tag")) == 3
    assert sizes("check_6", "enable_prefix_caching") >= {(True, True), (False, False)}
    ssm_layouts = {each.environment.get("VLLM_SSM_CONV_STATE_LAYOUT") for pair in pairs("check_6") for each in pair}
    assert ssm_layouts == {"DS"}
    staged = [tuple(extras(each).get("kv_buffer_device") for each in pair) for pair in pairs("check_7")]
    assert staged == [("cpu", "cpu"), ("cpu", None), (None, "cpu")]
    assert (True, True) in sizes("check_9", "async_scheduling")
    drafts = [serve_arguments(each.arguments).speculative_config for each, _ in pairs("check_9")]
    assert [draft and draft.get("method", draft.get("model")) for draft in drafts][:2] == [None, "ngram"]
    modules = [tuple(extras(each).get("kv_connector_module_path") for each in pair) for pair in pairs("check_10")]
    assert modules == [("connector", "connector"), (None, None)] * 3


@needs_jq
def test_engines_of_a_pair_have_side_channels_of_their_own(calls: dict[str, list[Call]]) -> None:
    taken: dict[int, set[int]] = {}
    for call in started(calls, ENGINE):
        arguments, base = serve_arguments(call.arguments), int(call.environment["VLLM_NIXL_SIDE_CHANNEL_PORT"])
        taken.setdefault(arguments.port, set()).update(base + index for index in range(arguments.data_parallel_size))
    of_p, of_d = taken.values()
    assert not of_p & of_d


@needs_jq
def test_the_router_and_the_load_fit_the_engines(calls: dict[str, list[Call]]) -> None:
    routers, loads = started(calls, ROUTER), started(calls, LOAD)
    assert len(routers) == len(loads) > 2
    for call in routers:
        router = parse_router_args(call.arguments)
        assert router.vllm_pd_disaggregation
        assert router.prefill_urls == [("http://localhost:8100", None)]
        assert router.decode_urls == ["http://localhost:8200"]
    parser = FlexibleArgumentParser()
    add_cli_args(parser)
    for call in loads:
        load = parser.parse_args(call.arguments)
        assert load.base_url == f"http://localhost:{router.port}"
        assert load.max_concurrency == 64


@needs_jq
def test_on_two_machines_engines_are_found_under_addresses(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ended = run_bash("check_2_on_d 192.0.2.1 192.0.2.2", tmp_path / "d", P_AT="192.0.2.1")
    assert "0 of 64 answers differ, 0 prompts have none" in ended.stdout
    (path,) = (tmp_path / "d" / "calls").iterdir()
    assert "VLLM_NIXL_SIDE_CHANNEL_HOST=192.0.2.2" in path.read_text()


@needs_jq
def test_the_profiler_leaves_the_engine_alone_and_sees_what_it_forks(calls: dict[str, list[Call]]) -> None:
    (profile,) = started(calls, "nsys")
    ours = profile.arguments[: profile.arguments.index("vllm")]
    assert ours[ours.index("--kill") + 1] == "none"
    assert {"--trace-fork-before-exec=true", "--cuda-graph-trace=node"} <= set(ours)


def test_the_variable_of_the_traces_is_that_of_the_connector() -> None:
    assert set(re.findall(r"NIXL_ACTOR_\w+", PAGE)) == {TRACE_DIRECTORY_VARIABLE}
