# Everything happens in $(VENV), which the first target used creates; nothing is installed outside it.
#   make run ARGS="rounds=2"      make test ARGS="-k ditto"      make lint      make bench      make peers      make parity
#   make bench ARGS=--check: has it become slower? All measurements: benchmarks/README.md
# PYTHON and VENV choose the interpreter and the folder: make test PYTHON=python3.12 VENV=/tmp/venv

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := run
.PHONY: install run test lint format bench peers parity

install: $(INSTALLED)

run: $(INSTALLED)
	$(BIN)/raypfl run $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench: $(INSTALLED)
	$(BIN)/python -m benchmarks.overhead $(ARGS)

peers: $(INSTALLED)
	$(BIN)/python -m benchmarks.peers $(ARGS)

parity: $(INSTALLED)
	$(BIN)/python -m benchmarks.parity $(ARGS)

$(INSTALLED): pyproject.toml constraints.txt bootstrap.py
	@command -v $(PYTHON) >/dev/null || \
		{ echo "raypfl needs Python 3.11, 3.12 or 3.13, but there is no $(PYTHON) here: please install one." >&2; exit 1; }
	@$(PYTHON) bootstrap.py $(VENV)
