# Everything from a bare machine with Python 3.11 or newer: `make demo`. `make` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# The least branch coverage, in per cent, that `make check` accepts.
COVERAGE_MIN ?= 80
# So many processes run the tests, each with servers of its own; 0 runs them in one, for a debugger.
WORKERS ?= 3

.DEFAULT_GOAL := help
.PHONY: help setup demo test lint types check fmt bench bench-quick bench-governor lock clean

help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-8s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(STAMP) ## Install expiry and its tools into .venv, exactly as locked

demo: setup ## Place holds, see them expire on time: everything in one process
	$(BIN)/expiry demo

test: setup ## Run the tests on embedded PostgreSQL and Valkey
	$(BIN)/pytest -n $(WORKERS)

lint: setup ## Check style, format and the floors that modules may import
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/lint-imports

types: setup ## Check the types
	$(BIN)/mypy

check: lint types ## Lint, types, and tests with branch coverage
	$(BIN)/pytest -n $(WORKERS) --cov --cov-report=term-missing:skip-covered --cov-fail-under=$(COVERAGE_MIN)

fmt: setup ## Format the code and apply the safe fixes
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

bench-quick: setup ## Guard the ratios that a change must not ruin (a minute)
	$(BIN)/python -m bench quick

bench-governor: setup ## Let holds become due beside a shop, and things go wrong (an hour)
	$(BIN)/python -m bench governor

bench: setup ## Measure beside every peer (hours; docs/benchmarks.md has the parts)
	$(BIN)/python -m bench all

lock: setup ## Pin the newest versions that pyproject.toml allows, with hashes
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --upgrade --universal --python-version 3.11 --generate-hashes \
		--no-emit-index-url --no-header --all-extras --output-file requirements.lock pyproject.toml

clean: ## Remove what make and the tools made; the data of `expiry dev` stays
	rm -rf $(VENV) .bench build dist htmlcov .coverage* *.egg-info .hypothesis \
		.import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find expiry governor tests bench -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# --no-deps: the lock is complete, and pip 23 takes coverage[toml] for a requirement without a pin once a newer one is
# out. umask: as root the servers run as another user, who must be able to read what is installed.
$(STAMP): pyproject.toml requirements.lock
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "expiry needs Python 3.11 or newer; name one with: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module; on Debian or Ubuntu install it with: apt install python3-venv" >&2; \
		exit 1; }
	umask 022 && $(PYTHON) -m venv $(VENV)
	umask 022 && $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--require-hashes --no-deps -r requirements.lock
	umask 022 && $(BIN)/python -m pip install --quiet --disable-pip-version-check \
		--no-deps --no-build-isolation -e .
	@touch $@
