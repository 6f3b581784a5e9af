# One word per chore. Everything runs in .venv, which `make setup` makes with nothing but python3.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint notebooks

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.installed ## make .venv and install the package and its tools (quick when nothing changed)

demo: setup ## run the first-aid notebook in a fresh kernel (half a minute) and print what nbdebug said
	@$(BIN)/python -m nbdebug demo

# What fails is run once more, with the values of its asserts: to rewrite all of them takes each process a quarter of a minute.
FAILED := --last-failed --last-failed-no-failures none
test: setup ## run the tests (a sample of the long lists of situations)
	@$(PYTEST) --assert=plain $(TESTS) || { $(PYTEST) $(FAILED) $(TESTS); exit 1; }

test-all: setup ## run the tests with every situation: some minutes more
	@NBDEBUG_ALL_TESTS=1 $(PYTEST) $(TESTS)

lint: setup ## ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

notebooks: setup ## execute the notebooks again, in place
	@$(BIN)/python -m tests.test_notebooks notebooks/*.ipynb

# The pinned packages go in by two processes and are compiled as they are imported: half the time on two cores. torch is
# among them, so that the last install keeps that build of it; that one adds what a Python has without a pin.
PIP := $(BIN)/python -m pip install -q --disable-pip-version-check
PINS := $(PIP) -q --no-deps --no-compile --no-warn-conflicts -r .venv/pins
.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (the first time takes minutes: torch is large)"
	@awk '/^[^#]/ {print > (".venv/pins-" (/^[p-z]/ ? 1 : 2) ".txt")}' constraints.txt
	@$(PINS)-1.txt & $(PINS)-2.txt && wait $$!
	@$(PIP) -c constraints.txt -e '.[dev]'
	@touch $@
