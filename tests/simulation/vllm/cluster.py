"""One run with vLLM's scheduler on both sides: clients, their prompts, and what must be left at the end.

A client does what a router does: the prompt goes to a prefill engine with `do_remote_decode`, the parameters of its
answer and the same prompt go to a decode engine. Some clients want two samples of one prompt, use parameters again that
were used up, have them damaged on the way or handed to another prompt, forge them where engines sign them, or leave, on
either engine, in whatever status their request has reached. Some routers have a third engine load the prompt first, and
lend it on to the decode engine.

Prompts share prefixes: some are beginnings of one of a few long texts, some go on by themselves after one, others stand
alone; some are shorter than a block. Where engines read back, some clients go on after the answer: their next prompt
begins with the last one and its answer, or with a part of them.
"""

from __future__ import annotations

import json
import logging
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec
import trio

from tests.rig.content import VOCABULARY_SIZE
from tests.simulation.active_faults import ActiveFaults
from tests.simulation.agenda import Agenda
from tests.simulation.cluster import PROBE_SECONDS, SPREAD_SHARE, Cluster, Result, run_cluster
from tests.simulation.coverage import TransitionKey
from tests.simulation.faults import Fault, Kind, Plan, generator
from tests.simulation.inflictor import RESTART_SECONDS_MIN
from tests.simulation.process import Surroundings
from tests.simulation.shapes import BLOCK_TOKENS, RANK_LAG_SECONDS_MAX, EngineShape, SecondGroup
from tests.simulation.vllm.config import MAX_MODEL_TOKENS, draw_knobs
from tests.simulation.vllm.content import sequence
from tests.simulation.vllm.engine import DECODE, LOADED, PREFILL, VllmEngine
from tests.simulation.vllm.oracles import ABORTED, Ask, Requests
from tests.simulation.vllm.sleep import MODES

TEXTS = 4
PROMPT_TOKENS_MAX = 8 * BLOCK_TOKENS
ANSWER_TOKENS_MAX = 56
FORGED_SHARE = 0.1
MISTAKEN_SHARE = 0.08
STOP_SHARE = 0.3
LOAD_FACTOR = 0.6
"""Requests are larger than those of the scripted engines, so there are fewer of them."""
QUEUED_MAX = 32
"""Prompts that routers let wait for one engine; one that comes then is refused. An engine with few blocks may have lent
most of them to nobody, for as long as a lease lasts, and more would still wait when the run is over."""
ABORTS_IN_DECODE = ("WAITING", "WAITING_FOR_REMOTE_KVS", LOADED, "RUNNING", "PREEMPTED", "PREEMPTED")
ABORTS_IN_PREFILL = ("WAITING", "RUNNING", "PREEMPTED", "PREEMPTED")
"""Preemption is rare, so clients wait for it twice as often."""
ABORTS_IN_READ_BACK = ("WAITING_FOR_REMOTE_KVS", LOADED)
READ_BACK_ABORT_SHARE = 0.15
CHAIN_SHARE = 0.2
"""In runs in which routers know chains, which are half of all."""
GAP_SHARE = 0.5
GAP_SECONDS_MAX = 0.5
"""How much later than the first one a sample comes: vLLM hands them over one by one."""
WITH_WINDOWS = "with windows"
WITH_DRAFTS = "with drafts"
WITH_STATES = "with states"
WITH_STATES_AND_OVERLAP = "with states in overlapping steps"


def simulate(plan: Plan) -> Result:
    """Run a plan on engines with vLLM's scheduler; see `tests.simulation.scripted.simulate`."""
    vllm_log = logging.getLogger("vllm")
    level = vllm_log.level
    vllm_log.setLevel(logging.CRITICAL + 1)  # failed loads and workers that stop are the rule here
    try:
        return run_cluster(plan, VllmCluster)
    finally:
        vllm_log.setLevel(level)


class SlowerReads(ActiveFaults):
    """Faults over a network on which a READ takes some steps of an engine; one that holds up its agent does not."""

    def __init__(self, plan: Plan, slowdown: int) -> None:
        super().__init__(plan)
        self._slowdown = slowdown

    def read_seconds(self, initiator: str, target: str, length_bytes: int) -> float:
        return self._slowdown * super().read_seconds(initiator, target, length_bytes)


class VllmCluster(Cluster[VllmEngine, VllmEngine]):
    """See the module's docstring."""

    def __init__(self, plan: Plan, agenda: Agenda) -> None:
        self._knobs = draw_knobs(plan.seed)
        super().__init__(plan, agenda)
        requests_per_second = self._shape.requests_per_second * LOAD_FACTOR
        # With windows and prefix caches, a reader refuses blocks that do not fill whole ones of its own.
        is_uniform = self._shape.model.second is SecondGroup.WINDOW and self._knobs.reads_back
        engines = {
            name: EngineShape(
                tp_size=engine.tp_size,
                block_tokens=BLOCK_TOKENS if is_uniform else max(BLOCK_TOKENS, engine.block_tokens),
            )
            for name, engine in self._shape.engines.items()
        }
        self._shape = msgspec.structs.replace(self._shape, requests_per_second=requests_per_second, engines=engines)
        self._faults = SlowerReads(plan, 1 if self._shape.reads_inline else self._knobs.read_slowdown)
        self._has_states = self._shape.model.second is SecondGroup.STATE
        self._requests = Requests(self._oracles, recomputes=self._knobs.recomputes, circumstances=self._circumstances())
        # Prompts that wait for an engine or are computed there, by its name.
        self._queued: Counter[str] = Counter()
        # With draws of their own.
        self._forgeries = generator(plan.seed, "forgeries")
        self._mistakes = generator(plan.seed, "prompts of others")
        self._stops = generator(plan.seed, "stop tokens")
        self._priorities = generator(plan.seed, "priorities")
        self._gaps = generator(plan.seed, "gaps between samples")
        self._departures = generator(plan.seed, "departures while an answer is read back")
        self._chains = generator(plan.seed, "chains of engines")
        self._has_chains = self._chains.random() < 0.5
        self._texts = [_tokens(self._chance, PROMPT_TOKENS_MAX) for _ in range(TEXTS)]

    def _circumstances(self) -> list[str]:
        """Of this run, which make what happens another matter."""
        return self._circumstances_of_the_model() + [WITH_DRAFTS] * (self._knobs.drafts > 0)

    def _circumstances_of_the_model(self) -> list[str]:
        if self._shape.model.second is SecondGroup.WINDOW:
            return [WITH_WINDOWS]
        if not self._has_states:
            return []
        return [WITH_STATES, WITH_STATES_AND_OVERLAP] if self._knobs.overlaps else [WITH_STATES]

    def _engine_ids(self) -> int:
        """Parameters that were damaged on their way describe an engine with other sizes, once more for each engine; and
        where engines read back or form chains, each gets to know decode engines too."""
        return 2 * (super()._engine_ids() + self._shape.decodes)

    def result(self, real_seconds: float, transitions: Counter[TransitionKey]) -> Result:
        self._requests.cover("overlapping steps", self._knobs.overlaps)
        return super().result(real_seconds, transitions)

    def _make_engines(self, around: Surroundings) -> None:
        def make(names: list[str], role: str) -> list[VllmEngine]:
            return [
                VllmEngine(around, name, self._engine_chance(name), self._knobs, self._requests, role=role)
                for name in names
            ]

        self._prefills = make(self._shape.prefill_names, PREFILL)
        self._decodes = make(self._shape.decode_names, DECODE)

    async def _inflict(self, fault: Fault) -> None:
        if fault.kind is Kind.SLEEP:
            await trio.sleep_until(fault.at_seconds)
            await self._put_to_sleep(next(each for each in self._engines if each.name == fault.target), fault)
        else:
            await super()._inflict(fault)

    async def _put_to_sleep(self, engine: VllmEngine, fault: Fault) -> None:
        """An operator does, and wakes it up; who could not give its memory up is started again."""
        process, sleep = engine.process, engine.sleep
        if process.has_died() or process.is_stopping:
            return
        sleep.ask(generator(self._plan.seed, f"sleep at {fault.at_seconds}").choice(MODES))
        await trio.sleep_until(fault.end_seconds)
        if engine.process is not process or process.has_died() or process.is_stopping:
            return
        self._faults.fired[Kind.SLEEP] += sleep.is_asleep
        if sleep.has_failed:
            engine.crash()
            await trio.sleep(RESTART_SECONDS_MIN)
            self._inflictor.restart(engine)
        else:
            sleep.wake_up()

    # --- clients ----------------------------------------------------------------------------------------------------

    def _begin(self, script: Coroutine[Any, Any, None]) -> trio.Event:
        """Clients of these engines are tasks."""
        ended = trio.Event()

        async def client() -> None:
            await script
            self._open_requests -= 1
            ended.set()

        self._open_requests += 1
        self._nursery.start_soon(client)
        return ended

    async def _run(self, script: Coroutine[Any, Any, None]) -> None:
        await script

    async def _ask(self, prefill: VllmEngine, decode: VllmEngine) -> None:
        answered = await self._talk(prefill, decode, self._draw_prompt(), None)
        while self._knobs.reads_back and answered is not None and self._chance.random() < 0.6:
            await trio.sleep(RANK_LAG_SECONDS_MAX)  # see `_prefill_prompt`
            prompt = self._draw_next_prompt(answered)
            if len(prompt) + ANSWER_TOKENS_MAX > MAX_MODEL_TOKENS:
                return
            params = json.loads(json.dumps(answered.answer_params))
            answered = await self._talk(self._chance.choice(self._prefills), decode, prompt, params)

    def _draw_next_prompt(self, answered: Ask) -> tuple[int, ...]:
        chance = self._chance
        so_far = (*answered.sequence.prompt, *answered.answer)
        if chance.random() < 0.2:
            return so_far[: chance.randint(1, len(so_far))]
        return so_far + _tokens(chance, chance.randint(1, BLOCK_TOKENS))

    async def _talk(
        self, prefill: VllmEngine, decode: VllmEngine, prompt: tuple[int, ...], read_back: dict[str, Any] | None
    ) -> Ask | None:
        """One prompt and its answers, of which one is returned that names blocks of its engine. `read_back`: what the
        answer before it did."""
        chance = self._chance
        self._numbers += 1
        number = self._numbers
        prefilled = self._prefill_ask(
            f"{prefill.name}-r{number}",
            prompt,
            # Routers ask for one token; who asks for more gets more blocks than the prompt needs.
            1 if chance.random() < 0.85 else chance.randint(2, 40),
            params=read_back or {"do_remote_decode": True, "do_remote_prefill": False},
            abort_in=self._draw_abort_on_prefill(read_back is not None),
            may_fail=read_back is not None,  # the engine that has answered may have given the blocks up
        )
        params = await self._prefill_prompt(prefill, prefilled)
        if params is None:
            return None
        await trio.sleep(chance.uniform(0.0001, 0.006))
        # P goes on with what it was asked for, and its window moves on with it: it keeps less than D needs.
        lacks_some = prefilled.max_tokens > 1 and self._shape.model.second is SecondGroup.WINDOW
        link = self._draw_link(prefill, decode)
        if link is not None:
            params = await self._lend_on(link, number, prompt, params, may_fail=lacks_some)
            if params is None:
                return None
            lacks_some = False
        if not self._shape.numbers_leases:
            del params["lease_number"]
        params, may_fail = self._damage(params)
        params, is_forged = self._forge(params)
        prompt, is_mistaken = self._mistake(prompt)
        may_fail |= is_forged or is_mistaken or lacks_some
        asked = [decode] * (2 if chance.random() < 0.1 else 1)
        self._requests.cover("two samples", len(asked) == 2)
        if chance.random() < SPREAD_SHARE and len(self._decodes) > 1:
            behind = self._engines.index(link or prefill) + 1
            asked += [each for each in self._decodes if each is not decode and each in self._engines[behind:]]
            self._requests.cover("samples on several engines")
        samples = [
            (
                engine,
                self._draw_sample(f"{engine.name}-r{number}.{sample}", prompt, params, engine, may_fail=may_fail),
            )
            for sample, engine in enumerate(asked)
        ]
        async with trio.open_nursery() as nursery:
            # On another engine one may come when all others have let go of the lease (docs/limits.md).
            late = [each for each in samples[1:] if each[0] is decode and self._gaps.random() < GAP_SHARE]
            for engine, ask in samples:
                if (engine, ask) not in late:
                    engine.submit(ask)
                    nursery.start_soon(self._wait, engine, ask)
            for engine, ask in late:
                gap_seconds = self._gaps.uniform(0.0, GAP_SECONDS_MAX)
                nursery.start_soon(self._submit_later, engine, ask, gap_seconds, samples[0][1])
        if chance.random() < 0.08:
            await self._repeat(number, prompt, params, decode)
        return next((ask for _, ask in samples if ask.answer_params is not None), None)

    def _draw_link(self, prefill: VllmEngine, decode: VllmEngine) -> VllmEngine | None:
        """An engine that loads a prompt before D does, and lends it on; None: D loads from P. Chains go one way, since
        engines that lend each other may wait for each other (docs/limits.md)."""
        chains = self._chains
        between = self._engines[self._engines.index(prefill) + 1 : self._engines.index(decode)]
        links = [each for each in between if each.may_read]
        # What a link would load of a state is what D needs (docs/limits.md).
        if not self._has_chains or not links or self._has_states or chains.random() >= CHAIN_SHARE:
            return None
        return chains.choice(links)

    async def _lend_on(
        self, link: VllmEngine, number: int, prompt: tuple[int, ...], params: dict[str, Any], *, may_fail: bool
    ) -> dict[str, Any] | None:
        """The parameters of a link's answer; None when there is none."""
        if not self._shape.numbers_leases:
            del params["lease_number"]
        leaves = self._chains.random() < 0.1
        ask = self._prefill_ask(
            f"{link.name}-r{number}.link",
            prompt,
            1,
            params=params | {"do_remote_decode": True},
            abort_in=self._chains.choice(ABORTS_IN_READ_BACK) if leaves else None,
            may_fail=may_fail,
        )
        lent = await self._prefill_prompt(link, ask)
        self._requests.cover("lent on by a link", lent is not None)
        return lent

    async def _submit_later(self, engine: VllmEngine, ask: Ask, gap_seconds: float, first: Ask) -> None:
        await trio.sleep(gap_seconds)
        if first.finish == ABORTED:
            return  # its client has left, and wants none of the others either
        self._requests.cover("a sample that comes late")
        engine.submit(ask)
        await self._wait(engine, ask)

    def _draw_abort_on_prefill(self, reads_back: bool) -> str | None:
        status = self._chance.choice(ABORTS_IN_PREFILL) if self._chance.random() < 0.1 else None
        if reads_back and self._departures.random() < READ_BACK_ABORT_SHARE:
            return self._departures.choice(ABORTS_IN_READ_BACK)
        return status

    def _prefill_ask(self, request_id: str, prompt: tuple[int, ...], max_tokens: int, **other: Any) -> Ask:
        """A request to P. Where there are states P leaves the last token to D, and says one after those before it."""
        if self._has_states and len(prompt) > 1:
            left = prompt[-1:]
            answered = sequence(prompt[:-1], 1)
            other |= {"sequence": answered, "left_to_decode": left}
        else:
            other["sequence"] = sequence(prompt, max_tokens)
        return Ask(request_id=request_id, max_tokens=max_tokens, priority=self._draw_priority(), **other)

    def _draw_priority(self) -> int:
        return self._priorities.randint(0, 3) if self._knobs.has_priorities else 0

    async def _repeat(self, number: int, prompt: tuple[int, ...], params: dict[str, Any], decode: VllmEngine) -> None:
        """A router uses the parameters again, on the same engine or on another one."""
        engine = decode if self._chance.random() < 0.7 else self._chance.choice(self._decodes)
        again = self._draw_sample(f"{engine.name}-r{number}.again", prompt, params, engine, may_fail=True)
        self._requests.cover("parameters used again")
        remote = params.get("remote_request_id")
        if remote in self._requests.owners:
            self._oracles.reuse(self._requests.owners[remote], remote)
        engine.submit(again)
        await self._wait(engine, again)

    async def _prefill_prompt(self, prefill: VllmEngine, ask: Ask) -> dict[str, Any] | None:
        """The parameters of the answer as the router has them; None when there is no answer."""
        if self._queued[prefill.name] >= QUEUED_MAX:
            self._requests.cover("refused by the router")
            return None
        self._queued[prefill.name] += 1
        prefill.submit(ask)
        await ask.ended.wait()
        self._queued[prefill.name] -= 1
        if ask.answer_params is None:
            return None
        # An answer is on its way for longer than the ranks of an engine are apart.
        await trio.sleep(RANK_LAG_SECONDS_MAX)
        if self._chance.random() < 0.03:
            prefill.leave(ask)
        params: dict[str, Any] = json.loads(json.dumps(ask.answer_params))
        return params

    def _draw_sample(
        self, request_id: str, prompt: tuple[int, ...], params: dict[str, Any], decode: VllmEngine, *, may_fail: bool
    ) -> Ask:
        stormy = self._faults.hits(Kind.ABORT, decode.name) is not None
        leaves = stormy or self._chance.random() < 0.08
        max_tokens = self._chance.randint(1, ANSWER_TOKENS_MAX)
        answered = sequence(prompt, max_tokens)
        return Ask(
            request_id=request_id,
            sequence=answered,
            max_tokens=max_tokens,
            stops_after=self._draw_stop(answered.answer),
            params=params,
            priority=self._draw_priority(),
            abort_in=self._chance.choice(ABORTS_IN_DECODE) if leaves else None,
            may_fail=may_fail,
        )

    def _draw_stop(self, answer: list[int]) -> int | None:
        if not self._knobs.stops or self._stops.random() >= STOP_SHARE:
            return None
        tokens = self._stops.randint(1, len(answer))
        # It stops at the first token of that kind.
        return answer.index(answer[tokens - 1]) + 1

    async def _wait(self, decode: VllmEngine, ask: Ask) -> None:
        """Until the request has ended; a few clients lose their patience."""
        if self._chance.random() < 0.03:
            with trio.move_on_after(self._chance.choice([0.003, 0.05, 0.5])):
                await ask.ended.wait()
                return
            decode.leave(ask)
        await ask.ended.wait()

    def _damage(self, params: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """What a careless router may do to the parameters, and whether it did."""
        if self._chance.random() >= 0.03:
            return params, False
        self._requests.cover("damaged parameters")
        field, value = self._chance.choice(
            [
                ("remote_block_ids", [params["remote_block_ids"][0][:-1]]),
                ("remote_block_ids", []),
                ("remote_engine_id", None),
                ("remote_port", 0),
                ("tp_size", "1"),
                ("tp_size", params["tp_size"] + 1),
            ]
        )
        return {**params, field: value}, True

    def _forge(self, params: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        """What a client may do who wants to see the blocks of others: well-formed, and wrong. Whether it did."""
        if not self._knobs.signs or self._forgeries.random() >= FORGED_SHARE or not params["remote_block_ids"]:
            return params, False
        neighbours = [[each - 1 if each > 1 else each + 1 for each in table] for table in params["remote_block_ids"]]
        if neighbours == params["remote_block_ids"]:
            return params, False
        self._requests.cover("forged parameters")
        return {**params, "remote_block_ids": neighbours}, True

    def _mistake(self, prompt: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """What a router sends to D that takes one prompt for another, shorter, longer or as long; whether it did.

        Without numbers of leases P is as a built-in engine, whose parameters say only of how many tokens they are: that
        is enough where there are states.
        """
        mistakes, says_which = self._mistakes, self._shape.numbers_leases
        if mistakes.random() >= MISTAKEN_SHARE or not (says_which or self._has_states):
            return prompt, False
        self._requests.cover("parameters of another prompt")
        if says_which and mistakes.random() < 0.5:
            changed = mistakes.randrange(len(prompt))
            return (*prompt[:changed], (prompt[changed] + 1) % VOCABULARY_SIZE, *prompt[changed + 1 :]), True
        if len(prompt) > 1 and (mistakes.random() < 0.7 or len(prompt) > PROMPT_TOKENS_MAX):
            return prompt[: -mistakes.randint(1, min(BLOCK_TOKENS, len(prompt) - 1))], True
        return prompt + _tokens(mistakes, mistakes.randint(1, BLOCK_TOKENS)), True

    def _draw_prompt(self) -> tuple[int, ...]:
        chance = self._chance
        kind = chance.random()
        if kind < 0.2:
            return _tokens(chance, chance.randint(1, BLOCK_TOKENS - 1))
        if kind < 0.5:
            return _tokens(chance, chance.randint(BLOCK_TOKENS, PROMPT_TOKENS_MAX))
        text = chance.choice(self._texts)
        beginning = text[: chance.choice([PROMPT_TOKENS_MAX, chance.randint(1, PROMPT_TOKENS_MAX)])]
        if kind < 0.75:
            return beginning
        return beginning + _tokens(chance, chance.randint(0, PROMPT_TOKENS_MAX - len(beginning)))

    # --- the end ----------------------------------------------------------------------------------------------------

    async def _probe(self, request_id: str, prefill: VllmEngine, decode: VllmEngine) -> None:
        """A request of this pair; it must be answered, and not by computing the prompt again."""
        self._numbers += 1
        prompt = _tokens(self._chance, 2 * BLOCK_TOKENS)
        params = {"do_remote_decode": True}
        prefilled = self._prefill_ask(f"{prefill.name}-r{self._numbers}", prompt, 1, params=params)
        answer = await self._prefill_prompt(prefill, prefilled)
        if answer is None:
            self._oracles.complain("recovery", f"{request_id}: {prefill.name} gave no answer")
            return
        ask = Ask(request_id=request_id, sequence=sequence(prompt, 3), max_tokens=3, params=answer)
        decode.submit(ask)
        await ask.ended.wait()

    async def _check_at_rest(self, when: str) -> None:
        # An engine that has nothing to do makes no step, and learns of the end of a quarantine with its next one.
        with trio.move_on_after(PROBE_SECONDS):
            for engine in self._engines:
                self._numbers += 1
                request_id = f"{engine.name}-r{self._numbers}.rest"
                ask = Ask(request_id=request_id, sequence=sequence((1,), 1), max_tokens=1, params=None)
                engine.submit(ask)
                await ask.ended.wait()
        self._requests.complain_about_open_ones()
        for engine in self._engines:
            for leftover in engine.leftovers():
                self._oracles.complain("leaks", f"{when} {leftover}")
        for read in self._around.nixl.reads_in_flight():
            self._oracles.complain("leaks", f"{when} READ {read.handle} of {read.initiator.agent_name} is in flight")


def _tokens(chance: random.Random, count: int) -> tuple[int, ...]:
    return tuple(chance.randrange(VOCABULARY_SIZE) for _ in range(count))
