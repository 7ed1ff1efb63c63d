# Needs nothing but python3 (3.10 or newer) and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt
INPUTS := pyproject.toml constraints.txt
# The project's own kernels need a GPU to run, so a machine without one is spared their packages.
EXTRAS := $(if $(wildcard /dev/nvidiactl /dev/dxg),[kernels],)

.PHONY: bench test lint types readme clean

bench: $(VENV)/installed ## measure attention on the GPU if there is one, else on the CPU
	$(BIN)/rlbench attention $(ARGS)

# Two at a time, each with one thread: the tests' many small processes would get in each other's way
# with more. A file stays in one process, which compiles what its tests share.
test: lint types ## all checks
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile $(ARGS)

lint: $(VENV)/installed-dev
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/installed-dev
	$(BIN)/mypy

readme: $(VENV)/installed ## make the README's tables anew from the reports they name
	$(BIN)/python -m rlbench.render.readme README.md

clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "rlbench needs Python 3.10 or newer: make PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python $(INPUTS)
	$(PIP) --editable '.$(EXTRAS)'
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable '.[dev,kernels]'
	touch $@
