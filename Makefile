# Everything a newcomer needs: `make serve` and `make test`. `make setup` is run by both and does nothing when up to date.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?=

.PHONY: setup test lint types tests serve bench clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	touch $@

test: setup lint types tests

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

tests: setup
	$(BIN)/python -m pytest

serve: setup
	$(BIN)/saccade serve $(MODEL) --port $(PORT)

bench: setup
	$(BIN)/python -m benchmarks.cpu

clean:
	rm -rf $(VENV) build *.egg-info
