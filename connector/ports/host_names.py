"""Addresses of hosts, from their names, by the system's resolver.

    waiters (any number) --> what is asked about a name --> threads that call getaddrinfo

A thread cannot be called back: where a name server hangs it stays as long as the resolver pleases, although its waiters
have given up. Names come from requests, so names that hang must not keep others from being found. Hence no thread waits
for another. All that want a name wait for the same answer. If the thread that is to give it has been out for long, the
next who comes sends another one, because a new question may find more. The first thread that finds something answers
for both; that nothing was found counts only from the newest. At most QUESTIONS_MAX threads are out for names that were
never found, and as many for those that were. Beyond, a name waits for one to come back, as after a start with hundreds
of engines; it is refused as soon as one has been out for long, unless it is being asked about already.

An answer may take longer than anybody waits: the resolver gives a silent name server five seconds before it asks the
next one. So an answer that was slow is used for a while. One that was quick is not, because the host may get another
address at any time.
"""

from __future__ import annotations

import math
import socket
from functools import partial
from typing import NamedTuple

import trio

from connector.addresses import is_ip_address, unbracketed
from connector.ports.descriptors import is_descriptor_left
from connector.ports.side_channel import DescriptorsExhausted, NameNotResolved, SideChannelError
from connector.thread_limit import NoThreadLeft
from connector.waiting_threads import call_in_thread

QUESTIONS_MAX = 256
AGAIN_SECONDS = 5.0
"""A question that is older may have been lost in an outage of the name server that is over."""
SLOW_SECONDS = 0.25
"""An answer that took as long may come too late for those who asked."""
KEPT_SECONDS = 30.0
"""How long it is used. A host that has got another address is not reached meanwhile, as with any cache of names; if
another engine has the former one, the handshake notices."""
FOUND_REMEMBERED_MAX = 4096


class _Inquiry:
    """What is being asked about a name, until there is an answer.

    Attributes:
        threads: sent out so far.
        began: when the newest of them was.
        problem: why there are no addresses.
        lacked_descriptor: this process had none left when nothing was found, so that says nothing of the name.
    """

    def __init__(self) -> None:
        self.threads = 0
        self.began = -math.inf
        self.is_answered = trio.Event()
        self.addresses: tuple[str, ...] = ()
        self.problem = ""
        self.lacked_descriptor = False


class _Found(NamedTuple):
    addresses: tuple[str, ...]
    until: float
    """When they may no longer be used."""


class HostNames:
    """Used in one trio run at a time."""

    def __init__(self) -> None:
        self._inquiries: dict[str, _Inquiry] = {}
        # Since when threads are out, the oldest first, by whether the name was found before.
        self._out: dict[bool, dict[tuple[_Inquiry, int], float]] = {False: {}, True: {}}
        self._one_is_back = trio.Event()
        # The names that were found last, the newest last.
        self._found: dict[str, _Found] = {}

    async def address(self, host: str, port: int) -> str:
        """The address of `host`, IPv4 if it has one (as libzmq would choose). Raises as `addresses` does.

        Args:
            port: for the error.
        """
        return (await self.addresses(host, port))[0]

    async def addresses(self, host: str, port: int) -> tuple[str, ...]:
        """All of the kind of the first one, in the order of the resolver. Several engines may share a name: that of a
        headless Service in Kubernetes is one for all its pods. Raises NameNotResolved, and DescriptorsExhausted where
        the resolver could not ask for want of a descriptor; `port` is for the error."""
        if is_ip_address(host):
            await trio.lowlevel.checkpoint()
            return (unbracketed(host),)
        found = self._found.get(host)
        if found is not None and trio.current_time() < found.until:
            await trio.lowlevel.checkpoint()
            return found.addresses
        inquiry = await self._inquiry(host, port)
        await inquiry.is_answered.wait()
        if not inquiry.addresses:
            kind: type[SideChannelError] = DescriptorsExhausted if inquiry.lacked_descriptor else NameNotResolved
            raise kind(host, port, inquiry.problem)
        return inquiry.addresses

    async def _inquiry(self, host: str, port: int) -> _Inquiry:
        """What is being asked about this name; another thread asks if that has been so for long."""
        while host not in self._inquiries and len(out := self._out[host in self._found]) >= QUESTIONS_MAX:
            patience_seconds = next(iter(out.values())) + AGAIN_SECONDS - trio.current_time()
            if patience_seconds <= 0:
                problem = f"{QUESTIONS_MAX} questions wait for a name server that does not answer"
                raise NameNotResolved(host, port, problem)
            with trio.move_on_after(patience_seconds):
                await self._one_is_back.wait()
        was_found = host in self._found
        inquiry = self._inquiries.get(host)
        if inquiry is None:
            inquiry = self._inquiries[host] = _Inquiry()
        if len(self._out[was_found]) < QUESTIONS_MAX and trio.current_time() - inquiry.began >= AGAIN_SECONDS:
            inquiry.began = trio.current_time()
            inquiry.threads += 1
            self._out[was_found][inquiry, inquiry.threads] = inquiry.began
            # A task of the run: the task that asks may give up, and others wait for the same answer.
            trio.lowlevel.spawn_system_task(partial(self._look_up, host, inquiry, inquiry.threads, was_found=was_found))
        return inquiry

    async def _look_up(self, host: str, inquiry: _Inquiry, number: int, *, was_found: bool) -> None:
        began = trio.current_time()
        look_up = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        problem = "the question was given up"
        try:
            found = await call_in_thread(look_up)
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
            family = found[0][0]
            inquiry.addresses = tuple(dict.fromkeys(str(entry[4][0]) for entry in found if entry[0] == family))
            self._remember(host, inquiry.addresses, is_slow=trio.current_time() - began >= SLOW_SECONDS)
        except Exception as error:  # a task of the run itself must not raise: everything would end
            problem = str(error) if isinstance(error, OSError | UnicodeError | NoThreadLeft) else repr(error)
        finally:
            del self._out[was_found][inquiry, number]
            self._one_is_back.set()
            self._one_is_back = trio.Event()
            if inquiry.addresses or number == inquiry.threads:
                inquiry.problem = problem
                # The resolver itself says that it does not know the name, or to try again later.
                inquiry.lacked_descriptor = not inquiry.addresses and not is_descriptor_left()
                if self._inquiries.get(host) is inquiry:
                    del self._inquiries[host]
                inquiry.is_answered.set()

    def _remember(self, host: str, addresses: tuple[str, ...], *, is_slow: bool) -> None:
        self._found.pop(host, None)
        self._found[host] = _Found(addresses, trio.current_time() + KEPT_SECONDS) if is_slow else _Found((), -math.inf)
        if len(self._found) > FOUND_REMEMBERED_MAX:
            del self._found[next(iter(self._found))]
