# Everything a newcomer needs: `make serve` and `make test`. Each installs what it needs, once; `make setup` installs all.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PORT ?= 8000
MODEL ?=

# Modules are compiled when they are first imported, and kept: without that, torch alone takes twice as long to import.
unexport PYTHONDONTWRITEBYTECODE

# What `make test-fast` runs: nothing that needs an engine, a server or Transformers.
FAST := tests/project/test_borders.py tests/project/test_vocabulary.py tests/scheduler tests/media \
	tests/checkpoint/test_config.py tests/engine/test_step_stats.py tests/engine/ipc/test_messages.py \
	tests/server/api tests/server/request tests/server/test_config.py tests/server/test_generation.py tests/server/test_metrics.py \
	tests/test_costs.py tests/util/test_fair_pool.py tests/test_sampling_params.py

.PHONY: setup setup-serving lock test test-fast lint types tests compile-tests conformance ray-tests browser valkey serve bench evaluate clean

setup:
	@PYTHON=$(PYTHON) tools/setup.sh everything

setup-serving:
	@PYTHON=$(PYTHON) tools/setup.sh serving

# The versions that set-up, CI and the image install. `make lock UPGRADE=--upgrade` takes the newest.
lock:
	@PYTHON=$(PYTHON) tools/lock.sh $(UPGRADE)

test: setup lint
	+$(MAKE) --no-print-directory -j2 types tests  # types beside the first tests

# What most changes touch, in half a minute: lint, borders, words, scheduler, media, configs and requests.
test-fast: setup lint
	$(BIN)/python -m pytest -n 2 -m "not slow and not server" $(FAST)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

browser:
	-@tools/browser.sh  # without one the page's tests fail and say so; all others still run

valkey: browser  # after it, since both may call apt-get
	-@tools/valkey.sh  # likewise for the tests of --embedding-store

# One worker more than cores: tests of servers wait a quarter of their time. Before the first run modules are imported
# once, which compiles them: else each worker would compile them all.
tests: setup browser valkey
	@[ -d tests/__pycache__ ] || { echo "modules are compiled, once"; \
		$(BIN)/python -m pytest -p no:xdist --collect-only -q >/dev/null; } || true
	$(BIN)/python -m pytest -n $$(($$(nproc 2>/dev/null || echo 4) + 1)) --maxprocesses 8 --dist worksteal -m "not ray and not conformance and not compiles"

# All kernels for all GPUs, about four minutes: after changes of kernels.
compile-tests: setup
	$(BIN)/python -m pytest -m compiles tests/kernels/test_compiles.py

# Every family of the zoo against Transformers, about ten minutes; `python -m tests.helpers.conformance` writes the table.
conformance: setup
	$(BIN)/python -m pytest -n 2 -m conformance tests/conformance

# Apart from the others: each starts Ray clusters on this machine, about four minutes in all.
ray-tests: setup
	$(BIN)/python -m pytest -n 0 -m ray tests/engine/ray_cluster tests/server/test_ray.py tests/server/test_ray_encoders.py

serve: setup-serving
	$(BIN)/saccade serve $(MODEL) --port $(PORT)

bench: setup
	$(BIN)/python -m benchmarks.cpu

# Accuracy of the built-in model, into the model card and the docs; to be run whenever its weights change.
evaluate: setup
	$(BIN)/saccade eval --markdown training/MODEL_CARD.md --markdown docs/evaluation.md
	$(BIN)/saccade tune --markdown docs/evaluation.md --plot docs/tune.svg

clean:
	rm -rf $(VENV) build *.egg-info
