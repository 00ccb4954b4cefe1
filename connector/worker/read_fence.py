"""No READ begins before the steps are over that may still write into its blocks.

A READ is not ordered with the device. vLLM gives blocks away when it knows what the step came to that used them last,
and takes that for the end of all that the step writes (`step_overlap`). With its second model runner it is not: what a
step came to is known before the drafter writes the KV of its own layers, and before states are brought to what was
accepted. A block of a draft layer may be one of another layer for its next owner, where cache groups share memory.

So the commands that ask for READs wait for the end of all steps that the device had been given before them, and an
abort waits behind what it is to end. Nothing else waits: a decode engine may ask for a lease before the engine makes
its next step, and one that is paused makes none, while others have to keep what the requests in its queue will read.
Where that runner writes nothing so late no command waits, nor on a processor, which has no such streams. The wait is
seen to be over by the engine's next step, so a READ begins up to a step later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Protocol

import torch

from connector.protocol import AbortPull, Command, StartPull

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StepEnd(Protocol):
    """A place in a stream of the device; an event of torch."""

    def query(self) -> bool:
        """Whether the device has come to it."""
        ...


def writes_late(vllm_config: VllmConfig, *, has_states: bool) -> bool:
    """Whether steps go on writing to the KV cache when vLLM knows what they came to."""
    return vllm_config.use_v2_model_runner and (vllm_config.speculative_config is not None or has_states)


def end_of_steps_on(device: torch.device) -> Callable[[], StepEnd] | None:
    """Makes the end of what `device` has been given until now; None for a processor."""
    if device.type == "cpu":
        return None
    return lambda: torch.accelerator.current_stream(device).record_event()


class ReadFence:
    """See the module's docstring.

    Args:
        end_of_steps: of the device.
    """

    def __init__(self, end_of_steps: Callable[[], StepEnd]) -> None:
        self._end_of_steps = end_of_steps
        self._last: StepEnd | None = None
        # READs, and what aborts them, in the order in which they came; with what each has to wait for.
        self._held: deque[tuple[StepEnd | None, StartPull | AbortPull]] = deque()

    def note_step(self) -> None:
        """The device has been given a whole step. Waits for nothing."""
        self._last = self._end_of_steps()

    def let_through(self, commands: Iterable[Command] = ()) -> list[Command]:
        """Of those held and these, what may go now; of one request in order."""
        found: list[Command] = []
        for command in commands:
            if isinstance(command, StartPull) and command.awaited:
                self._held.append((self._last, command))
            elif isinstance(command, AbortPull) and self._holds(command.request_id):
                self._held.append((None, command))
            else:
                found.append(command)
        while self._held and (self._held[0][0] is None or self._held[0][0].query()):
            found.append(self._held.popleft()[1])
        return found

    def _holds(self, request_id: str) -> bool:
        return any(command.request_id == request_id for _, command in self._held)
