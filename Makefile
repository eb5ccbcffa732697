# `make demo` and `make test` are the two to begin with; both prepare .venv first.
PYTHON ?= python3
BIN := .venv/bin
# A .venv of another Python stays, unless PYTHON is given.
PREPARE := $(PYTHON) scripts/prepare_venv.py $(if $(filter file,$(origin PYTHON)),--keep-python)

# Without compiled files every program that a test starts compiles all its modules again.
unexport PYTHONDONTWRITEBYTECODE

PARALLEL := -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder
PYTEST := $(BIN)/python -m pytest $(PARALLEL)

.PHONY: help setup demo test test-all test-bare tools lint docs api dist prove-arm64
help:
	@echo "make demo [ARGS='--devices 4']   broker, aggregator and agents on this machine, from nothing to a report"
	@echo "make test [ARGS='-k ledger']     the tests that need no minutes; whatever needs a program that is missing is skipped"
	@echo "make test-all                    every test, slow ones too"
	@echo "make test-bare                   some of the tests where PATH has Python and coreutils alone"
	@echo "make tools                       installs the programs that the tests need; asks first"
	@echo "make lint                        ruff and mypy, the devices' packages for Python 3.10 as well"
	@echo "make docs                        the documentation as a site into build/site; no network needed"
	@echo "make api                         an API reference of all packages into build/api"
	@echo "make dist                        wheel and sdist into dist/, and the wheel tried in a clean environment"
	@echo "make prove-arm64 [ARGS='--only power-cut']   proofs on an emulated ARM64 board; Linux, root, an hour"
	@echo "make setup [PYTHON=python3.12]   prepare .venv only; the others do it themselves"

setup:
	@$(PREPARE)

demo:
	@$(PREPARE) demo
	@$(BIN)/metafleet demo $(ARGS)

test: setup
	@$(PYTEST) -m "not slow" $(ARGS)

test-all: setup
	@$(PYTEST) $(ARGS)

test-bare: setup
	@$(BIN)/python -m tests.support.bare $(PARALLEL) -m "not slow" $(ARGS)

tools:
	@$(PYTHON) scripts/install_tools.py

lint: setup
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/mypy --python-version 3.10 --no-warn-return-any fleet_core edge_agent

docs: setup
	@$(BIN)/python scripts/make_docs.py

api: setup
	@$(BIN)/pdoc --output-directory build/api metafleet fleet_core edge_agent cloud_server export firmware_profiles
	@echo build/api/index.html

dist: setup
	@$(BIN)/python scripts/make_dist.py

prove-arm64: setup
	@$(BIN)/python -m benchmarks.arm64.prove $(ARGS)
