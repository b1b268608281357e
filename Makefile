# Each target installs what it needs into .venv; nothing else is required.
# PYTHON=... overrides the choice: the first of these that really runs and is 3.11-3.13.
SHELL := /bin/bash
VENV ?= .venv
BIN := $(VENV)/bin
CHECK := import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))
PYTHON ?= $(shell for p in python3.12 python3 python3.13 python3.11; do "$$p" -c '$(CHECK)' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

# torch for the comparison with transformers: its small CPU build is of Python 3.11.
PARITY_VENV ?= .venv-parity
PARITY_TORCH ?= torch==2.13.0
PARITY_PYTHON ?= $(shell for p in python3.11 python3; do "$$p" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' >/dev/null 2>&1 && { echo "$$p"; break; }; done)

.PHONY: install demo test test-fast parity lint bench clean

install: $(VENV)/.installed

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11-3.13 found; install python3.12 or pass PYTHON=/path/to/python" >&2; exit 2; }
	"$(PYTHON)" -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@ $(VENV)/.installed

demo: install
	$(BIN)/kairox generate -m smollm2-135m -p "Once upon a time, in a small village by the sea," -n 64 --temperature 0 \
	  --mode exact --policy guide --gpu-cache-neurons 512

# Files run side by side, in as many processes as there are cores, four at most: each takes some GB.
PYTEST := -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

test: $(VENV)/.installed-dev
	$(BIN)/python $(PYTEST)

test-fast: $(VENV)/.installed-dev
	$(BIN)/python $(PYTEST) -m "not slow"

$(PARITY_VENV)/.installed:
	@test -n "$(PARITY_PYTHON)" || { echo "error: no Python 3.11 found; install python3.11 or pass PARITY_PYTHON=/path/to/python" >&2; exit 2; }
	"$(PARITY_PYTHON)" -m venv $(PARITY_VENV)
	$(PARITY_VENV)/bin/python -m pip install --quiet '$(PARITY_TORCH)' transformers
	@touch $@

parity: $(VENV)/.installed-dev $(PARITY_VENV)/.installed
	rm -rf $(PARITY_VENV)/cases
	$(PARITY_VENV)/bin/python tests/parity/build_cases.py $(PARITY_VENV)/cases
	KAIROX_PARITY="$(abspath $(PARITY_VENV)/cases)" $(BIN)/python -m pytest tests/parity

lint: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright

bench: $(VENV)/.installed-dev
	$(BIN)/python -m benchmarks.bench_cpu_decode

clean:
	rm -rf $(VENV) $(PARITY_VENV)
