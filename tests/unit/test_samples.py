"""Requests of one engine that name one lease, under vLLM's own scheduler: the samples of a prompt (`n`), which come one
by one, with steps between them. None of them fails because another one was faster.

The worker lets go of a lease with the READ that it was held for, before the scheduler hears of its end. So whoever may
come too late for P's blocks is told apart here, and not there.
"""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from connector.protocol import AbortPull, LetGo, ReleaseUnread, StartPull
from tests.unit.hybrid_engine import BLOCK_TOKENS, REMOTE_DECODE, HybridEngine, full, mla, state, tokens_of, window

PROMPT = tokens_of(5 * BLOCK_TOKENS + 4)
SHARED = pytest.mark.parametrize("specs", [[full()], [mla()]], ids=["full", "MLA"])
OTHERS = pytest.mark.parametrize(
    ("specs", "caches"),
    [
        ([full()], False),
        ([full(), window(40)], True),
        ([full(), state("none")], False),
        ([full(), state("align")], True),
    ],
    ids=["no cache", "window", "state", "states that are cached"],
)


@pytest.fixture(autouse=True)
def any_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the worker side can register is not the matter here."""
    monkeypatch.setattr("connector.nixl_connector.require_supported", lambda *_: None)


class Samples:
    """Requests on D with the parameters of one prompt."""

    def __init__(self, specs: list[Any], *, caches: bool = True, **settings: Any) -> None:
        prefill = HybridEngine(specs, engine_id="p", caches_prefixes=caches)
        prefill.run("a", PROMPT, REMOTE_DECODE)
        self.params = prefill.params["a"]
        self.decode = HybridEngine(specs, engine_id="d", caches_prefixes=caches, **settings)
        self._numbers = count()

    def come(self) -> str:
        name = f"{next(self._numbers)}_r"
        self.decode.submit(name, PROMPT, self.params, max_tokens=4)
        return name

    def said(self, *kinds: type) -> list[Any]:
        return [each for each in self.decode.commands if isinstance(each, kinds)]

    @property
    def read(self) -> list[str]:
        return [each.request_id for each in self.said(StartPull)]

    @property
    def unread(self) -> list[str]:
        return [each.request_id for each in self.said(ReleaseUnread)]

    def fail(self, name: str) -> None:
        blocks = set(self.decode.pull_of(name).local_block_ids)
        self.decode.step(KVConnectorOutput(finished_recving={name}, failed_recving={name}, invalid_block_ids=blocks))

    def run(self) -> None:
        for _ in range(12):
            self.decode.step()


@SHARED
@pytest.mark.parametrize("steps_between", [0, 1])
def test_one_reads_and_the_others_find_it_in_the_cache(specs: list[Any], steps_between: int) -> None:
    samples = Samples(specs)
    first, *others = names = [samples.come()]
    for _ in range(3):
        for _ in range(steps_between):
            samples.decode.step()
        others.append(samples.come())
    names = [first, *others]
    for _ in range(3):
        samples.decode.step()
    assert (samples.read, samples.unread) == ([first], [])
    samples.decode.loaded(first)
    late = samples.come()
    samples.run()
    assert samples.read == [first]
    assert sorted(samples.unread) == sorted([*others, late])
    assert set(samples.decode.finished) == {*names, late}
    for name in (*others, late):
        # One has to be computed in any case, and three answers follow.
        assert samples.decode.computed[name] - 3 <= BLOCK_TOKENS, name
    assert not samples.said(LetGo)


@SHARED
def test_one_that_is_queued_for_long_has_p_keep_nothing_for_it(specs: list[Any]) -> None:
    """The other one has loaded what both need. If the cache has lost it by then, it is computed."""
    samples = Samples(specs)
    samples.decode.scheduler.max_num_active_reqs = 1
    first, second = samples.come(), samples.come()
    samples.decode.step()
    samples.decode.loaded(first)
    samples.decode.step()
    assert second not in samples.decode.computed, "it is not its turn yet"
    assert (samples.read, samples.unread) == ([first], [second])
    samples.run()
    assert (samples.read, samples.unread) == ([first], [second])
    assert set(samples.decode.finished) == {first, second}


@SHARED
@pytest.mark.parametrize("recomputes", [False, True])
def test_where_a_load_fails_the_others_try_at_once(specs: list[Any], recomputes: bool) -> None:
    """None of them waits for a second one: each would wait for its own deadline, one after the other."""
    samples = Samples(specs, recomputes=recomputes)
    first, *others = [samples.come() for _ in range(3)]
    samples.decode.step()
    assert samples.read == [first]
    samples.fail(first)
    samples.decode.step()
    assert samples.read == [first, *others]


@pytest.mark.parametrize("caches", [True, False])
def test_parameters_that_come_again_after_a_failed_load_are_the_ranks_matter(caches: bool) -> None:
    """A router tries again. If nothing is lent any more that load fails, too, as the policy says: it is not computed
    behind the back of who wants to know."""
    samples = Samples([full()], caches=caches)
    first = samples.come()
    samples.decode.step()
    samples.fail(first)
    samples.run()
    again = samples.come()
    samples.decode.step()
    assert samples.read == [first, again]


@pytest.mark.parametrize("caches", [True, False])
def test_where_failed_loads_are_computed_so_is_what_comes_again(caches: bool) -> None:
    """Without a load that is known to fail."""
    samples = Samples([full()], caches=caches, recomputes=True)
    first = samples.come()
    samples.decode.step()
    samples.fail(first)
    samples.run()
    again = samples.come()
    samples.run()
    assert samples.read == [first]
    assert set(samples.decode.finished) == {first, again}


@SHARED
def test_where_the_client_of_the_first_leaves_the_others_read(specs: list[Any]) -> None:
    samples = Samples(specs)
    first, second = samples.come(), samples.come()
    samples.decode.step()
    samples.decode.scheduler.finish_requests(first, RequestStatus.FINISHED_ABORTED)
    samples.decode.step()
    assert [each.request_id for each in samples.said(AbortPull)] == [first]
    assert (samples.read, samples.unread) == ([first, second], [])


@SHARED
def test_one_that_comes_when_the_cache_has_lost_the_prompt_is_computed(specs: list[Any]) -> None:
    """P may have its blocks back: of a sample that is handed over late, or of parameters that a router repeats."""
    samples = Samples(specs)
    first = samples.come()
    samples.decode.step()
    samples.decode.loaded(first)
    samples.run()
    assert samples.decode.scheduler.reset_prefix_cache()
    late = samples.come()
    samples.run()
    assert (samples.read, samples.unread) == ([first], [late])
    assert set(samples.decode.finished) == {first, late}
    assert samples.decode.computed[late] - 3 == len(PROMPT)


@SHARED
def test_one_that_needs_nothing_takes_nothing_from_the_others(specs: list[Any]) -> None:
    samples = Samples(specs)
    first, second = samples.come(), samples.come()
    samples.decode.scheduler.finish_requests(first, RequestStatus.FINISHED_ABORTED)
    samples.decode.step()
    assert (samples.read, samples.unread) == ([second], [first])


@OTHERS
def test_elsewhere_each_reads_until_nobody_wants_the_lease(specs: list[Any], caches: bool) -> None:
    samples = Samples(specs, caches=caches)
    first = samples.come()
    samples.decode.step()
    second = samples.come()
    samples.decode.step()
    samples.decode.loaded(first)
    samples.decode.step()
    assert (samples.read, samples.unread) == ([first, second], [])
    assert all(pull.keeps_lease for pull in samples.said(StartPull))
    assert not samples.said(LetGo)
    samples.decode.loaded(second)
    samples.decode.step()
    (told,) = samples.said(LetGo)
    assert (told.lease, told.peer) == (samples.decode.pull_of(first).lease, samples.decode.pull_of(first).peer)
    late = samples.come()
    samples.run()
    assert (samples.read, samples.unread) == ([first, second], [late])
    assert set(samples.decode.finished) == {first, second, late}


@OTHERS
def test_elsewhere_whoever_describes_p_otherwise_is_told_of_the_lease_by_itself(specs: list[Any], caches: bool) -> None:
    """A client says wrong sizes: the ranks take that for another engine, and keep the lease for it apart."""
    samples = Samples(specs, caches=caches)
    first, wrong = samples.come(), "wrong"
    samples.decode.submit(wrong, PROMPT, samples.params | {"tp_size": 2}, max_tokens=4)
    samples.decode.step()
    samples.decode.step()
    assert samples.read == [first, wrong]
    for name in (first, wrong):
        samples.decode.loaded(name)
        samples.decode.step()
        assert samples.said(LetGo)[-1].peer == samples.decode.pull_of(name).peer
    assert len(samples.said(LetGo)) == 2


@OTHERS
def test_elsewhere_one_that_waits_keeps_the_lease(specs: list[Any], caches: bool) -> None:
    """It has got no blocks yet when the one that reads is over."""
    samples = Samples(specs, caches=caches, blocks=18 if window(40) in specs else 12)
    first, second = samples.come(), samples.come()
    samples.decode.step()
    assert samples.read == [first]
    samples.decode.scheduler.finish_requests(first, RequestStatus.FINISHED_ABORTED)
    samples.decode.step()
    assert not samples.said(LetGo)
    samples.decode.scheduler.finish_requests(second, RequestStatus.FINISHED_ABORTED)
    samples.decode.step()
    kinds = [type(each) for each in samples.said(StartPull, AbortPull, ReleaseUnread, LetGo)]
    assert kinds == [StartPull, AbortPull, ReleaseUnread, LetGo]
