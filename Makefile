# Everything happens in $(VENV), which the first target used creates; nothing is installed outside it.
#   make run ARGS="rounds=2"      make test ARGS="-k ditto"      make lint      make docs      make bench, peers or parity
#   make bench ARGS=--check: has it become slower? All measurements: benchmarks/README.md
# PYTHON and VENV choose the interpreter and the folder: make test PYTHON=python3.12 VENV=/tmp/venv
# WORKERS is how many processes run tests, each with a Ray of its own; it takes 3 GB.

PYTHON ?= python3
VENV ?= .venv
ARGS ?=
WORKERS ?= 2
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := run
.PHONY: install run test lint format docs dist bench peers parity

install: $(INSTALLED)

run: $(INSTALLED)
	$(BIN)/raypfl run $(ARGS)

test: $(INSTALLED)
	$(BIN)/python -m pytest --numprocesses $(WORKERS) --dist loadfile --max-worker-restart 1 $(ARGS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: $(INSTALLED)
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

docs: $(INSTALLED).docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "Written: build/site/index.html"

dist: $(INSTALLED)
	bash .ci/package $(BIN)/uv

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

$(INSTALLED).docs: $(INSTALLED)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable ".[docs]"
	@touch $@
