# `make demo` and `make test` are the two to begin with; both prepare .venv first.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help setup demo test lint prove-arm64
help:
	@echo "make demo [ARGS='--devices 4']   broker, aggregator and agents on this machine, from nothing to a report"
	@echo "make test [ARGS='-k ledger']     the tests"
	@echo "make lint                        ruff and mypy, the devices' packages for Python 3.10 as well"
	@echo "make prove-arm64 [ARGS='--only power-cut']   proofs on an emulated ARM64 board; Linux, root, an hour"
	@echo "make setup [PYTHON=python3.12]   prepare .venv only; the others do it themselves"

setup:
	@$(PYTHON) scripts/prepare_venv.py

demo: setup
	@$(BIN)/metafleet demo $(ARGS)

test: setup
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 --no-warn-return-any fleet_core edge_agent

prove-arm64: setup
	@$(BIN)/python -m benchmarks.arm64.prove $(ARGS)
