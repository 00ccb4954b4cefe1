# make demo    two real vLLM engines exchange KV through this connector and the answers are compared
# make test    everything that can be checked here: make check, then all tests: first those that need no whole engine,
#              two at a time, then those that do; the models beside tests that mostly wait
# make explore the model checker on three requests, which takes minutes
# make simulate SEEDS=100   that many seeds of the simulator: the machines alone, then the production actors
# make oracle  100,000 random pairs of models and engines: each read plan is carried out and judged by bytes
# make mutants dozens of deliberately broken variants of the product, each of which an oracle of the simulator must notice
# make diagrams draws the tables and the simulated sequences again, after a change
# make check   style, formatting and types
# make setup   the Python environment in .venv; the other targets call it, and it costs nothing when up to date
# make clean   removes what the targets above made, except .venv

PYTHON ?= python3
BIN := .venv/bin
MODELS := tests/e2e/test_families.py
WITH_MODELS := tests/e2e/test_builtin_compatibility.py tests/e2e/test_options_at_start.py
SEEDS ?= 100

.PHONY: setup demo check test explore simulate oracle mutants diagrams clean
.DEFAULT_GOAL := test

setup:
	@$(PYTHON) .ci/setup_environment.py

demo: setup
	@$(BIN)/python -m tests.e2e.demo

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict statemachine connector

test: check
	$(BIN)/python -m pytest -n 2 --dist loadfile tests/unit tests/simulation tests/actors tests/conformance
	$(BIN)/python -m pytest -n 2 --dist loadfile $(MODELS) tests/integration $(WITH_MODELS)
	$(BIN)/python -m pytest tests/e2e $(patsubst %,--ignore %,$(MODELS) $(WITH_MODELS))

explore: setup
	$(BIN)/python -m statemachine.explore 3 1 1
	$(BIN)/python -m statemachine.explore 2 2 2

simulate: setup
	$(BIN)/python -m tests.simulation --level 1 --seeds $(SEEDS)
	$(BIN)/python -m tests.simulation --level 2 --seeds $(SEEDS)

oracle: setup
	@$(BIN)/python -m tests.unit.layout_oracle --examples 100000

mutants: setup
	$(BIN)/python -m tests.simulation.mutants

diagrams: setup
	$(BIN)/python -m statemachine.diagrams diagrams
	$(BIN)/python -m tests.simulation.sequences diagrams/sequences

clean:
	rm -rf .state traces build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
