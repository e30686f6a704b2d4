# Two commands for newcomers: `make train` and `make test`. Both make their own .venv.

PYTHON ?= python3
VENV := .venv
STAMP := $(VENV)/.installed
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo)

.PHONY: help install train test test-all soak check format docs release-check bench clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

install: $(STAMP) ## the package and its development tools in .venv

$(STAMP): pyproject.toml constraints.txt
	@command -v $(PYTHON) >/dev/null || { echo "need Python 3.11 or newer; Debian: apt-get install python3 python3-venv"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "need Python 3.11 or newer, got $$($(PYTHON) -V)"; exit 1; }
	@$(PYTHON) -m venv $(VENV) || { echo "Debian keeps venv in a package of its own: installing python3-venv" && \
	  $(SUDO) apt-get update -q && $(SUDO) apt-get install -yq python3-venv && $(PYTHON) -m venv $(VENV); }
	$(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable '.[dev]'
	@touch $(STAMP)

train: $(STAMP) ## train a small DLRM on generated Criteo-shaped data; ends with AUC beside the best possible AUC
	$(VENV)/bin/pibroch train

# bytecode is kept: tests start a hundred programs
TESTS = PYTHONDONTWRITEBYTECODE= $(VENV)/bin/python -m pytest
TWO_AT_A_TIME = -n 2 --dist worksteal
ALONE = $$(grep -rl --include='test_*.py' 'mark\.alone' tests)

test: $(STAMP) check ## style, types, and the tests that take six minutes on two cores; tests/tiers.py says which
	$(TESTS) -m 'not full' $(TWO_AT_A_TIME) --most-retried 3

test-all: $(STAMP) ## the other tests, 30 minutes: many ranks, roles, RPC, random input; last those that must be alone
	$(TESTS) -m 'full and not alone' $(TWO_AT_A_TIME) --most-retried 2
	$(TESTS) -m alone $(ALONE) --most-retried 1

soak: export PIBROCH_FUZZ_S = 600
soak: export PIBROCH_HOSTILE_FRAMES = 300000
soak: export PIBROCH_SOAK_CONNECTIONS = 2000
soak: export PIBROCH_SOAK_EXAMPLES = 1000
soak: export PIBROCH_SOAK_EXCHANGES = 100000
soak: export PIBROCH_SOAK_FRAMES = 60000
soak: export PIBROCH_SOAK_KAFKA_STROKES = 50
soak: export PIBROCH_SOAK_KILLS = 300
soak: export PIBROCH_SOAK_LONG_ROWS = 1
soak: export PIBROCH_SOAK_MUTATIONS = 1000
soak: export PIBROCH_SOAK_PAIRS = 400
soak: export PIBROCH_SOAK_READINGS = 20
soak: export PIBROCH_SOAK_RELOADS = 10
soak: export PIBROCH_SOAK_REQUESTS = 100000
soak: export PIBROCH_SOAK_RUN_STROKES = 200
soak: export PIBROCH_SOAK_STREAM_KILLS = 60
soak: export PIBROCH_SOAK_STREAM_S = 1800
soak: export PIBROCH_SOAK_STREAM_STROKES = 1200
soak: export PIBROCH_SOAK_TORCH_SUITES_EVERY = 1
soak: export PIBROCH_SOAK_WHOLE_GRIDS = 1
soak: $(STAMP) ## hours: what has a short form above at full length, one test at a time; for a quiet machine
	$(TESTS) -m soak --timeout 0

check: $(STAMP) ## style and types
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy

format: $(STAMP) ## rewrite to the house style
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

docs: $(STAMP) ## the site in docs/_build; a warning is an error
	$(VENV)/bin/python -m sphinx -q -W --keep-going -b html docs docs/_build
	@echo "open docs/_build/index.html"

release-check: $(STAMP) ## version, changelog, and the wheel in an environment of its own
	$(VENV)/bin/python tools/release_check.py

bench: $(STAMP) ## peers in their own environment, then the table of `single_process`
	benchmarks/peers/install.sh
	$(VENV)/bin/pibroch bench single_process

clean: ## remove what was made, not the runs
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis
