"""What a step writes late, and who waits for it: READs into our blocks, and the answer that lends a prompt's blocks.

A READ is not ordered with the device, be it ours into our blocks or a peer's out of them. vLLM gives blocks away, and
answers, when it knows what the step came to that used them last, and takes that for the end of all that the step writes
(`step_overlap`). With its second model runner it is not: what a step came to is known before the drafter writes the KV
of its own layers, and before states are brought to what was accepted. With the first one it is not for drafters that
begin when tokens are known on the host (`disable_padded_drafter_batch`).

Ours: a block of a draft layer may be one of another layer for its next owner, where cache groups share memory. So READs
are told to the actors together with the end of all steps that the device had been given before them (`AfterSteps`), and
the actors look at that themselves (`runtime.deferred_commands`).

A peer's: a decode engine reads as soon as it has the answer of P, and what it reads too soon is what was in the block
before. With the built-in connector it asks nobody. So a step with which a prompt that will be lent may end is waited
for before vLLM hears what it came to (`wait`). The engine thread waits for the device then, as it does for checksums
(`block_sums`), and the next step is given to it later by what that takes to prepare. What a decode engine lends for
read-back ends with any of its steps, and the next turn of a conversation comes later than the end of one: nobody waits
there.

Where nothing is written so late nothing waits, nor on a processor, which has no such streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import torch

from connector.protocol import AfterSteps, Command, StartPull
from connector.worker.device_stream import may_wait

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class StepEnd(Protocol):
    """A place in a stream of the device; an event of torch."""

    def query(self) -> bool:
        """Whether the device has come to it. May be called in any thread."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


def writes_late(vllm_config: VllmConfig, *, has_states: bool, is_last_stage: bool) -> bool:
    """Whether steps go on writing to the KV cache of this rank when vLLM knows what they came to. Of several pipeline
    stages the last one drafts."""
    drafts = vllm_config.speculative_config if is_last_stage else None
    if vllm_config.use_v2_model_runner:
        return drafts is not None or has_states
    return drafts is not None and drafts.disable_padded_drafter_batch


def end_of_steps_on(device: torch.device) -> Callable[[], StepEnd] | None:
    """Makes the end of what `device` has been given until now; None for a processor."""
    if device.type == "cpu":
        return None
    return lambda: torch.accelerator.current_stream(device).record_event()


class StepFence:
    """See the module's docstring. On the engine thread.

    Args:
        end_of_steps: of the device.
    """

    def __init__(self, end_of_steps: Callable[[], StepEnd]) -> None:
        self._end_of_steps = end_of_steps
        self._last: StepEnd | None = None

    def note_step(self) -> None:
        """The device has been given a whole step. Waits for nothing."""
        self._last = self._end_of_steps()

    def wait(self) -> None:
        """Until the device has done what it was given until now."""
        if self._last is not None:
            with may_wait():
                self._last.synchronize()

    def with_steps(self, command: Command) -> Command | AfterSteps:
        """The command, with what it has to wait for if it has to."""
        if self._last is None or not isinstance(command, StartPull):
            return command
        return AfterSteps(command, self._last.query)
