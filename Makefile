# make demo    two real vLLM engines exchange KV through this connector and the answers are compared
# make test    what has to hold at each commit, part after part, each of which runs whatever became of the others:
#                check, test-parts (tests that need no whole engine, two at a time), upstream, test-engines
#                (engines without a model, and those pairs of whole ones that show most), upstream-next-vllm,
#                test-next-vllm, simulate-fresh, programs (which of those that tests need are missing; an error where
#                CI=true and apt could have brought them). Half an hour
# make test-all   the same, with test-long (all other files, two at a time: rare engines, floods, churn) and test-alone
#                (tests of how soon something is noticed, and of engines that take long to start, which want the machine
#                for themselves); before a release. An hour or more
# make upstream   vLLM's own scheduler-level tests of its connector, with this one in its place; fetches vLLM's source
#              distribution (44 MB) the first time, and says SKIPPED where it cannot, unless CI is set to true
# make upstream-next-vllm, make test-next-vllm   vLLM's own tests, and what shows most on the newest vLLM that is
#              supported and has no build for CPUs: its Python, from its source distribution, with the compiled code of
#              the installed one; make test-next-vllm-all: all that meets vLLM
# make explore every order of events of the two cores with a few requests, in which up to two go wrong; takes minutes
# make simulate SEEDS=100   that many seeds of the simulator: the two cores alone, then the production actors
# make simulate-fresh   seeds that nobody has run before, on all levels, for 40 seconds
# make lowest  tests with the oldest versions of libraries that pyproject.toml admits, fetched the first time; part of
#              test-all
# make soak    a day of virtual time: eight engines of each role that come and go; three to ten minutes. Goes on with
#              the next seed where the last one ended; make soak SOAK_SEEDS=10 runs ten
# make churn   a real decode engine meets 1,000 real prefill engines that come and go; prints what it keeps of them, and
#              fails if that is anything; TCP=1: over TCP
# make crashes a fault at every await and every call of a port, one after the other; up to 32 (OF_A_SITE_MAX) of each
#              place in the code of each process, spread over the run; some twenty minutes
# make oracle  100,000 random pairs of models and engines: each read plan is carried out and judged by bytes
# make mutants hundreds of deliberately broken variants of the product, each of which a test or an oracle must notice
# make chaos MINUTES=5 SEED=1   real engines under load: prefill engines die, hang and come back, the network loses what
#                they send, proxies misbehave and strangers call: no wrong answer, nothing left; BUILTIN=1 runs the same
#                plan with the built-in connector
# make fuzz MINUTES=10   damaged messages for every decoder of bytes from outside, and for the two sockets
# make attack  floods, crowds and messages without end against a real prefill engine; what they cost, and whom
# make bench   this connector beside the one built into vLLM, case after case, in turns; about half an hour
# make prometheus unpacks Prometheus for the tests of alerts and dashboard, which skip without it; make programs says so
# make test-gpu   tests/gpu on a CUDA device; needs this package, torch, NIXL, pytest and pytest-timeout, and no vLLM.
#              Skips all, and says so in its last line, where there is no device; with DEVICE=cuda (or cuda:1) it fails
# make diagrams draws the tables and the simulated sequences again, after a change
# make check   style, formatting and types
# make setup   the Python environment in .venv; the other targets call it, and it costs nothing when up to date
# make clean   removes what the targets above made, except .venv

PYTHON ?= python3
BIN := .venv/bin
ALONE := tests/e2e/test_dead_prefill.py tests/e2e/test_lease_acknowledged.py tests/e2e/test_mixed_leases.py \
         tests/e2e/test_deepseek_v4.py tests/e2e/test_chaos.py tests/e2e/test_ray.py tests/e2e/test_span_times.py
ENGINES := tests/e2e/test_engines.py tests/e2e/test_families.py tests/e2e/test_builtin_compatibility.py \
           tests/e2e/test_request_kinds.py tests/e2e/test_metrics.py tests/e2e/test_cache_reset.py \
           tests/e2e/test_routers.py tests/e2e/test_hostile_input.py tests/e2e/test_aborts.py \
           tests/e2e/test_security.py tests/e2e/test_why.py tests/e2e/test_spans.py
# Minutes of floods, churn, ten thousand requests or broken connectors, and what is a matter of NIXL's version alone. With
# every pair of engines that stands nowhere else: test-long.
LONG := tests/conformance/test_nixl_facts.py tests/unit/test_ten_thousand_requests.py tests/simulation/test_soak.py \
        tests/simulation/test_broken_connectors.py tests/actors/test_churn.py \
        tests/integration/test_attacks.py tests/integration/test_leaks.py tests/integration/test_networks.py
NEXT_VLLM := 0.33.0
# Where the two versions differ for a connector: the caches' memory, schedulers, pairs with the built-in connector, sleep.
ON_NEXT_VLLM := tests/unit/test_layout_remote.py tests/unit/test_registration.py tests/unit/test_parallelism.py \
        tests/unit/test_other_prompts.py tests/unit/test_read_back.py tests/unit/test_connector_scheduler.py \
        tests/e2e/test_builtin_compatibility.py tests/e2e/test_request_kinds.py tests/e2e/test_sleep.py
SEEDS ?= 100
SEED ?= 1
SOAK_SEEDS ?= 1

.PHONY: help setup demo check test parts test-all all-parts test-parts test-engines test-long test-alone upstream-next-vllm test-next-vllm test-next-vllm-all upstream programs lowest explore simulate simulate-fresh \
        soak churn crashes oracle mutants chaos fuzz attack test-gpu prometheus bench diagrams clean
.DEFAULT_GOAL := help

help:
	@sed -n 's/^# \{0,1\}//p; /^$$/q' Makefile

setup:
	@$(PYTHON) .ci/setup_environment.py

demo: setup
	@$(BIN)/python -m tests.e2e.demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict --exclude /test_ statemachine connector tests/explore tests/simulation

# --keep-going: a part that fails hides no other, and the exit status is that of the whole.
test: setup
	@$(MAKE) --no-print-directory --keep-going --jobs=1 parts

# What failed stands near the end of a long log: simulate-fresh is short.
parts: check test-parts upstream test-engines upstream-next-vllm test-next-vllm simulate-fresh programs

test-all: setup
	@$(MAKE) --no-print-directory --keep-going --jobs=1 all-parts

all-parts: check test-parts upstream test-engines test-long test-alone lowest upstream-next-vllm test-next-vllm-all \
        simulate-fresh programs

# The slowest are named, so that it can be seen where the time goes.
# In the order of the conftest.py files: files that share engines follow each other, short ones are left for the end.
TWO_AT_A_TIME := -n 2 --durations 25 --dist loadfile --no-loadscope-reorder

test-parts: setup
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) $(LONG:%=--ignore %) \
		tests/unit tests/explore tests/simulation tests/actors tests/conformance

test-engines: setup
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) $(LONG:%=--ignore %) tests/integration tests/gpu $(ENGINES)

test-long: setup
	$(BIN)/python -m pytest $(TWO_AT_A_TIME) $(patsubst %,--ignore %,$(ALONE) $(ENGINES)) $(LONG) tests/e2e

test-alone: setup
	$(BIN)/python -m pytest $(ALONE)

upstream-next-vllm: setup
	$(BIN)/python -m tests.on_vllm --or-skip $(NEXT_VLLM) tests.upstream --or-skip

test-next-vllm: setup
	$(BIN)/python -m tests.on_vllm --or-skip $(NEXT_VLLM) pytest $(TWO_AT_A_TIME) $(ON_NEXT_VLLM)

test-next-vllm-all: setup
	$(BIN)/python -m tests.on_vllm --or-skip $(NEXT_VLLM) pytest $(TWO_AT_A_TIME) $(LONG:%=--ignore %) \
		tests/unit tests/integration $(ENGINES)

programs: setup
	@$(BIN)/python -m tests.programs

lowest: setup
	$(BIN)/python -m tests.lowest $(TWO_AT_A_TIME)

upstream: setup
	$(BIN)/python -m tests.upstream --or-skip

explore: setup
	$(BIN)/python -m tests.explore

simulate: setup
	$(BIN)/python -m tests.simulation --level 1 --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation --level 2 --seeds $(SEEDS)

simulate-fresh: setup
	$(BIN)/python -m tests.simulation.fresh --seconds 40

soak: setup
	@$(BIN)/python -m tests.simulation.soak --seeds $(SOAK_SEEDS)

churn: setup
	@$(BIN)/python -m tests.actors.churn --peers 1000 $(if $(TCP),--tcp)

crashes: setup
	$(BIN)/python -m tests.simulation.crashes

oracle: setup
	@$(BIN)/python -m tests.unit.layout_oracle --examples 100000

mutants: setup
	$(BIN)/python -m tests.simulation.mutants

# With the Python that has torch for the device: make test-gpu PYTHON=... A device that is named has to be there.
test-gpu:
	@$(PYTHON) -c "import torch, pytest, pytest_timeout" || { \
		echo "say which Python has torch for the device, NIXL, pytest and pytest-timeout: make test-gpu PYTHON=..." >&2; \
		exit 1; }
	$(PYTHON) -m pytest -s tests/gpu --device $(or $(DEVICE),any)

prometheus:
	@$(PYTHON) .ci/fetch_prometheus.py

chaos: setup
	@$(BIN)/python -m tests.chaos --minutes $(or $(MINUTES),5) --seed $(SEED) $(if $(BUILTIN),--builtin)

fuzz: setup
	@$(BIN)/python -m tests.fuzz --minutes $(or $(MINUTES),10)

attack: setup
	@$(BIN)/python -m tests.attack

bench: setup
	@$(BIN)/python -m tests.bench

diagrams: setup
	$(BIN)/python -m diagrams.draw
	$(BIN)/python -m tests.simulation.sequences diagrams/sequences

clean:
	rm -rf .state traces build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
