# make demo    two real vLLM engines exchange KV through this connector and the answers are compared
# make test    everything that can be checked here: make check, then all tests, cheap ones first
# make explore the model checker on three requests, which takes minutes
# make simulate SEEDS=100   that many seeds of the simulator: production actors, faults, virtual time; LEVEL=1 runs the
#              machines alone, which is some twenty times faster
# make diagrams draws the tables again, after a change
# make check   style, formatting and types
# make setup   the Python environment in .venv; the other targets call it, and it costs nothing when up to date
# make clean   removes what the targets above made, except .venv

PYTHON ?= python3
BIN := .venv/bin
SEEDS ?= 100
LEVEL ?= 2

.PHONY: setup demo check test explore simulate diagrams clean
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
	$(BIN)/python -m pytest

explore: setup
	$(BIN)/python -m statemachine.explore 3 1 1
	$(BIN)/python -m statemachine.explore 2 2 2

simulate: setup
	$(BIN)/python -m tests.simulation --level $(LEVEL) --seeds $(SEEDS)

diagrams: setup
	$(BIN)/python -m statemachine.diagrams diagrams

clean:
	rm -rf .state traces build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
