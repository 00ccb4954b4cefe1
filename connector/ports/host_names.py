"""Addresses of hosts, from their names, by the system's resolver.

    waiters (any number) --> a question about a name --> a thread that calls getaddrinfo

A thread cannot be called back: where a name server hangs it stays as long as the resolver pleases, although its waiters
have given up. Names come from requests, so names that hang must not keep others from being found. Hence no thread waits
for another. All that ask for a name share the question that is under way, unless that is so old that a new one may find
more. At most QUESTIONS_MAX are under way about names that were never found, and as many about those that were; beyond,
a name is refused at once.
"""

from __future__ import annotations

import socket
from functools import partial

import trio

from connector.addresses import is_ip_address, unbracketed
from connector.ports.side_channel import NameNotResolved

QUESTIONS_MAX = 256
AGAIN_SECONDS = 5.0
"""A question that is older may have been lost in an outage of the name server that is over."""
FOUND_REMEMBERED_MAX = 4096


class _Question:
    """What a thread finds: addresses, or why there are none."""

    def __init__(self, *, was_found: bool) -> None:
        self.was_found = was_found
        self.began = trio.current_time()
        self.is_answered = trio.Event()
        self.addresses: tuple[str, ...] = ()
        self.problem: str | None = "the question was given up"


class HostNames:
    """Used in one trio run at a time."""

    def __init__(self) -> None:
        # The newest about each name, and all whose threads have not ended.
        self._newest: dict[str, _Question] = {}
        self._open: set[_Question] = set()
        # The names that were found last, the newest last.
        self._found: dict[str, None] = {}

    async def address(self, host: str, port: int) -> str:
        """The address of `host`, IPv4 if it has one (as libzmq would choose). Raises NameNotResolved.

        Args:
            port: for the error.
        """
        return (await self.addresses(host, port))[0]

    async def addresses(self, host: str, port: int) -> tuple[str, ...]:
        """All of the kind of the first one, in the order of the resolver. Several engines may share a name: that of a
        headless Service in Kubernetes is one for all its pods. Raises NameNotResolved; `port` is for the error."""
        if is_ip_address(host):
            await trio.lowlevel.checkpoint()
            return (unbracketed(host),)
        question = self._newest.get(host)
        if question is None or trio.current_time() - question.began >= AGAIN_SECONDS:
            question = self._ask(host, port)
        await question.is_answered.wait()
        if question.problem is not None:
            raise NameNotResolved(host, port, question.problem)
        return question.addresses

    def _ask(self, host: str, port: int) -> _Question:
        was_found = host in self._found
        if sum(each.was_found is was_found for each in self._open) >= QUESTIONS_MAX:
            raise NameNotResolved(host, port, f"{QUESTIONS_MAX} questions wait for a name server that does not answer")
        question = self._newest[host] = _Question(was_found=was_found)
        self._open.add(question)
        # A task of the run: the task that asks may give up, and others wait for the same answer.
        trio.lowlevel.spawn_system_task(self._look_up, host, question)
        return question

    async def _look_up(self, host: str, question: _Question) -> None:
        look_up = partial(socket.getaddrinfo, host, None, type=socket.SOCK_STREAM)
        try:
            # A limiter of its own: `_ask` is what limits, and nothing else in this process may wait for these.
            found = await trio.to_thread.run_sync(look_up, abandon_on_cancel=True, limiter=trio.CapacityLimiter(1))
            found.sort(key=lambda entry: entry[0] != socket.AF_INET)
            family = found[0][0]
            of_family = dict.fromkeys(str(entry[4][0]) for entry in found if entry[0] == family)
            question.addresses, question.problem = tuple(of_family), None
            self._remember(host)
        except Exception as error:  # a task of the run itself must not raise: everything would end
            question.problem = str(error) if isinstance(error, OSError | UnicodeError) else repr(error)
        finally:
            self._open.discard(question)
            if self._newest.get(host) is question:
                del self._newest[host]
            question.is_answered.set()

    def _remember(self, host: str) -> None:
        self._found.pop(host, None)
        self._found[host] = None
        if len(self._found) > FOUND_REMEMBERED_MAX:
            del self._found[next(iter(self._found))]
