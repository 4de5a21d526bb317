# Everything a contributor runs. `make help` lists the targets. Continuous integration runs `make test` and nothing else.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
CORE   := $(VENV)/.core-installed
SERVER := $(VENV)/.server-installed
STAMP  := $(VENV)/.test-installed

PIP    := $(BIN)/python -m pip install --disable-pip-version-check --quiet
# an interrupted set-up may have left an environment without pip
MEND   := $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)

# Test processes, each with one compute thread. One more than there are cores, up to five: tests of servers often wait.
CORES   := $(shell nproc 2>/dev/null || echo 2)
WORKERS ?= $(shell echo $$(($(CORES) < 4 ? $(CORES) + 1 : 5)))
# Servers that tests start find the package compiled, whatever the environment says.
ENV     := OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=
PYTEST  := $(ENV) $(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup
# The inner loop: packages whose tests start no engine, server or browser, and one file of each of the first two.
UNITS   := attention cli control drafters kernels kv lanes metrics models runtime sampling simulate tokenizer
QUICK   := $(UNITS:%=tests/%) $(wildcard tests/test_*.py) tests/engine/test_offline.py tests/server/test_chat.py
# A cluster has a dozen processes of its own: its tests run behind the others, alone.
RAY     := $(ENV) $(BIN)/python -m pytest -m 'ray and not soak' tests/cluster

PORT        ?= 8000
SERVE_MODEL ?= smollm2
SERVE_ARGS  ?=

DEMO_MODEL  ?= smollm2
DEMO_TOKENS ?= 64
DEMO_PROMPT ?= Original: The old lighthouse keeper climbed the winding stairs every evening to light the great lamp for the \
ships at sea. Copy: The old lighthouse keeper

.DEFAULT_GOAL := help
.PHONY: help setup test quick test-gpu test-ray lint format types demo serve soak figures clean

help: ## show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(STAMP) ## create .venv and install the package with its test tools

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' must be Python 3.11 or newer; install one and run: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
	  echo "error: '$(PYTHON)' lacks the venv module; on Debian or Ubuntu: sudo apt install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Packages come from wherever this machine's pip is set up to look.
$(CORE): pyproject.toml | $(BIN)/python
	@$(MEND)
	$(PIP) -e .
	@touch $@

$(STAMP): pyproject.toml | $(BIN)/python
	@$(MEND)
	$(PIP) -e '.[test,server,ray]' || { echo "no Ray for this Python or machine: its tests will be skipped" >&2; $(PIP) -e '.[test,server]'; }
	@touch $@ $(CORE) $(SERVER)

$(SERVER): pyproject.toml | $(BIN)/python
	@$(MEND)
	$(PIP) -e '.[server]'
	@touch $@ $(CORE)

test: lint types ## everything CI runs: format, lint, types, tests
	$(PYTEST) -m 'not gpu and not soak and not ray'
	$(RAY)

quick: $(STAMP) ## the inner loop: lint and the fast tests, about a minute
	@$(BIN)/python -m ruff check --quiet .
	$(PYTEST) -q -x -m 'not gpu and not slow and not network' $(QUICK)

test-gpu: $(STAMP) ## the tests that need a CUDA device (on an H200 with WORKERS=14 little more than a minute)
	$(PYTEST) -m gpu

test-ray: $(STAMP) ## the last part of `make test`: a real Ray Serve cluster on this machine
	$(RAY)

lint: $(STAMP) ## ruff: rules and format, no changes
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(STAMP) ## ruff: apply fixes and format
	$(BIN)/python -m ruff check --fix .
	$(BIN)/python -m ruff format .

types: $(STAMP) ## mypy
	$(BIN)/python -m mypy --num-workers $(CORES)

demo: $(CORE) ## generate from the built-in model with n-gram speculation
	$(BIN)/python -m verifypd pull $(DEMO_MODEL)
	$(BIN)/python -m verifypd generate --model $(DEMO_MODEL) --draft ngram --temperature 0 --max-tokens $(DEMO_TOKENS) --echo \
	  '$(DEMO_PROMPT)'

serve: $(SERVER) ## start the OpenAI-compatible server on the built-in model (PORT=8000, SERVE_ARGS=…)
	$(BIN)/python -m verifypd pull $(SERVE_MODEL)
	$(BIN)/python -m verifypd serve --model $(SERVE_MODEL) --port $(PORT) $(SERVE_ARGS)

soak: $(STAMP) ## ten minutes of drawn engines, and of overload against the server; writes benchmarks/results/server-soak.json
	$(BIN)/python -m pytest -m soak -o faulthandler_timeout=1800 tests/engine tests/server

figures: $(STAMP) ## draw the pictures of the documentation again
	$(BIN)/python docs/images/draw.py
	$(BIN)/python docs/images/draw_cpu.py
	$(BIN)/python docs/images/draw_gpu.py
	$(BIN)/python docs/images/draw_bench.py

clean: ## remove .venv, caches and build outputs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
