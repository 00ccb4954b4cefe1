"""An agent whose data moves over another of NIXL's back ends than UCX. Less is known of those.

What LIBFABRIC does with errors (NIXL 1.5.1, docs/nixl.md fact 42) leaves nobody in a position to say of a READ that it
has ended with one:

* It makes all READs progress when it is asked about one. An error that it meets is that READ's, whosesoever it is, and
  NIXL never asks about that one again.
* It frees a READ that is released in flight, and uses it later.

So an error is no end here, and says of no agent that it cannot be reached. The READ stays in flight, as one from a peer
that hangs: its request ends at its deadlines, and its blocks are in quarantine until the engine starts again.
Notifications are asked for before READs: an error that is met there is nobody's. The second reading of a READ's last
descriptor is left out, which answers for UCX alone.

A peer shakes hands with each agent once. The first READ from one that was removed and loaded again would wait for that
in vain for a minute, and every other READ with it. So an agent that was loaded stays loaded.
"""

from __future__ import annotations

from typing import Any

from connector.observe.log import get_logger, is_said
from connector.ports.nixl import AgentName, NixlEvent, PortReadEnded, ReadHandle
from connector.ports.nixl_agent.calls import FirstReadOver
from connector.ports.nixl_agent.core import AgentCore, Read

_log = get_logger()


class OtherBackEndCore(AgentCore):
    """See the module's docstring."""

    _in_doubt: tuple[Any, ...] = ()
    """Handles of first READs that may be in flight."""
    _errors = 0

    def _forget_agent(self, name: AgentName) -> None:
        """It stays loaded."""

    def poll_reads(self) -> list[NixlEvent | FirstReadOver]:
        self._received += self._take_notifications()
        return super().poll_reads()

    def _look_at(self, handle: ReadHandle, read: Read) -> PortReadEnded | None:
        try:
            state = self._agent.check_xfer_state(read.transfer)
        except Exception as error:
            self._note_error(error)
            return None
        return self._take_state(handle, read, state)

    def _take_state(self, handle: ReadHandle, read: Read, state: str) -> PortReadEnded | None:
        if state != "DONE" or read.post_error is not None:
            return None
        return self._end(handle, read, None)

    def _take_notifications(self) -> list[NixlEvent]:
        try:
            return super()._take_notifications()
        except Exception as error:
            self._note_error(error)
            return []

    def _end_first_read(self, agent: AgentName, failure: tuple[str, bool] | None = None) -> None:
        super()._end_first_read(agent)

    def _forget_first_read(self, agent: AgentName) -> None:
        transfer = self.first_reads.get(agent)
        if transfer is None:
            return
        try:
            is_over = self._agent.check_xfer_state(transfer) == "DONE"
        except Exception:
            is_over = False
        if is_over:
            super()._forget_first_read(agent)
        else:
            self._in_doubt += (self.first_reads.pop(agent),)

    def destroy(self) -> None:
        if self._in_doubt:
            self.leak()
        else:
            super().destroy()

    def _note_error(self, error: Exception) -> None:
        self._errors += 1
        if is_said(self._errors):
            _log.warning(
                "NIXL reports an error, which may be of any READ in flight: %s (number %d)",
                self.describe(error)[0],
                self._errors,
            )
