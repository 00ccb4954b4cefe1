"""One entry point under atheris: inputs that reach new code are kept and changed further; one that breaks is written
down. A process of its own, because atheris ends the process that it runs in.

    python -m tests.fuzz.decoders NAME SECONDS DIRECTORY       looks for inputs that break it
    python -m tests.fuzz.decoders NAME FILE                    does what a reproducer says, once
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

INPUT_BYTES_MAX = 1 << 16
MEMORY_MB_MAX = 1024
SECONDS_OF_ONE_MAX = 10
"""Of one input; most take microseconds, so this finds what does not end."""


def main() -> None:
    name, *rest = sys.argv[1:]
    if len(rest) == 1:
        from tests.fuzz.targets import TARGETS, check

        is_understood = check(TARGETS[name], Path(rest[0]).read_bytes())
        print("understood" if is_understood else "refused, as it should be")
        return
    import atheris

    with atheris.instrument_imports(include=["connector.wire", "statemachine"]):
        from tests.fuzz.mutations import mutate
        from tests.fuzz.targets import TARGETS, check

    target = TARGETS[name]
    directory = Path(rest[1])
    corpus = directory / "corpus" / name
    corpus.mkdir(parents=True, exist_ok=True)
    for number, seed in enumerate(target.seeds):
        (corpus / f"seed-{number}").write_bytes(seed)
    crashes = directory / "crashes"
    crashes.mkdir(exist_ok=True)
    options = [
        f"-max_total_time={rest[0]}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-rss_limit_mb={MEMORY_MB_MAX}",
        f"-timeout={SECONDS_OF_ONE_MAX}",
        f"-artifact_prefix={crashes}/{name}-",
        "-print_final_stats=1",
        "-verbosity=1",
    ]

    def try_one(data: bytes) -> None:
        check(target, data)

    def change(data: bytes, size_max: int, seed: int) -> bytes:
        """Half of the time as a message is damaged, else as atheris does."""
        choose = random.Random(seed)
        if choose.random() < 0.5:
            return mutate([data, *target.seeds], choose)[:size_max]
        changed: bytes = atheris.Mutate(data, size_max)
        return changed

    atheris.Setup([sys.argv[0], *options, str(corpus)], try_one, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
