# One word per chore. Everything runs in .venv, which `make setup` makes with nothing but python3.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint notebooks

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: .venv/.installed ## make .venv and install the package and its tools (quick when nothing changed)

demo: setup ## run the first-aid notebook in a fresh kernel (half a minute) and print what nbdebug said
	@$(BIN)/python -m nbdebug demo

test: setup ## run the tests (one of three of long lists of situations)
	@$(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

test-all: setup ## run the tests with every situation: some minutes more
	@NBDEBUG_ALL_TESTS=1 $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder $(TESTS)

lint: setup ## ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo --no-cache

notebooks: setup ## execute the notebooks again, in place
	@$(BIN)/python -m tests.test_notebooks notebooks/*.ipynb

# torch goes first and alone: every other install then keeps that build of it.
.venv/.installed: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@echo "installing into .venv (the first time takes minutes: torch is large)"
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt torch==2.13.0
	@$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
