# inferscope. `make help` lists the targets; ARGS is passed on to what a target runs.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
ARGS ?=
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
COMPILED := $(VENV)/.compiled
TORCH := torch==2.13.0
SECONDS_A_RUN ?= 45
SEEDS ?= 1
OLDEST ?=
CORE := $(wildcard inferscope/record/_core/*.c inferscope/record/_core/*.h)

# Runs pytest on what a marker or a folder selects; that nothing was selected is a failure and is said.
define selected
@$(BIN)/python -m pytest $(1) $(ARGS) || { status=$$?; \
  if [ $$status -eq 5 ]; then echo "make $@: no test was selected, so nothing was checked" >&2; fi; exit $$status; }
endef

.PHONY: help venv native demo demo-seeds test check format docs bench faults soak soak-capture test-backends test-integrations test-frameworks wheels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(COMPILED) ## create .venv with everything that tests and the demo need (PYTHON=python3.12 chooses the interpreter)

# Keyed on what an installation depends on; the core is compiled by its own rule below, so that a change to it alone is cheap.
# The stamp is written last, so that a broken installation is repeated.
$(INSTALLED): pyproject.toml hatch_build.py
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
	@$(BIN)/python -m pip install --quiet "$(TORCH)"
	@INFERSCOPE_NO_COMPILE=1 INFERSCOPE_REQUIRE_COMPILE=0 $(BIN)/python -m pip install --quiet --editable ".[grpc,demo]" --group dev
	@touch $@

$(COMPILED): $(INSTALLED) $(CORE)
	@$(BIN)/python hatch_build.py
	@touch $@

native: $(INSTALLED) ## compile the C core in place and nothing else
	@$(BIN)/python hatch_build.py

demo: venv ## serve the demo under load until its objective breaks, and explain why
	@$(BIN)/inferscope demo --seconds $(SECONDS_A_RUN) $(ARGS)

demo-seeds: venv ## the main job's acceptance tests with five seeds in a row; wants a quiet machine
	@for seed in 1 2 3 4 5; do echo "== seed $$seed"; DEMO_SEED=$$seed $(BIN)/python -m pytest tests/demo/test_main_job.py $(ARGS) || exit 1; done

test: venv ## every test but soak, planted faults, real backends and servers; those marked gpu are skipped without an accelerator
	$(call selected,-m "not soak and not faults and not backends and not servers")

check: venv ## lint, format, types, layers, documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict
	$(BIN)/pyright
	$(BIN)/lint-imports --no-cache
	@$(MAKE) --no-print-directory docs

format: venv ## let ruff rewrite what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: venv ## links resolve, code in the README and docs compiles
	$(call selected,tests/contracts/test_docs.py -q)

bench: venv ## every benchmark, tables on the terminal and rows in build/bench (ARGS=--quick for the short form)
	@shopt -s nullglob; scripts=(benchmarks/[a-z]*.py); mkdir -p build/bench; \
	  if [ $${#scripts[@]} -eq 0 ]; then echo "make bench: there is no benchmark" >&2; exit 1; fi; failed=(); \
	  for script in "$${scripts[@]}"; do name=$$(basename "$$script" .py); echo "== $$name"; \
	    $(BIN)/python "$$script" --json "build/bench/$$name.json" $(ARGS) || failed+=("$$name"); done; \
	  if [ $${#failed[@]} -gt 0 ]; then echo "make bench: failed: $${failed[*]}" >&2; exit 1; fi

faults: venv ## plant faults and check that each diagnosis names its own (SEEDS=5 runs each service so often)
	@export FAULT_SEEDS=$(SEEDS); $(BIN)/python -m pytest -m faults $(ARGS)

soak: venv ## the runs that take minutes
	$(call selected,-m soak --timeout 0)

soak-capture: venv ## of these, the ones about captures
	$(call selected,-m soak -k capture --timeout 0)

test-backends: venv ## fetch receivers and databases of other projects into build, then test against them; skips what cannot be had
	@$(BIN)/python benchmarks/_fetch.py
	$(call selected,-m backends)

test-integrations: venv ## integrations against real libraries and servers, fetched into build; skips what cannot be had (OLDEST=1: oldest releases)
	@export OLDEST=$(OLDEST); python="$$($(BIN)/python benchmarks/_servers.py)"; SERVERS_FETCH=1 "$$python" -m pytest -m "not soak" $(if $(OLDEST),-W ignore) tests/integrations tests/cli/test_run.py tests/cli/test_run_servers.py tests/examples/test_small_examples.py tests/examples/test_queue_consumers.py $(ARGS)

test-frameworks: venv ## Ray Serve, BentoML and KServe, each with an environment of its own in build; takes minutes, no part of .ci/run
	@export SERVERS_FETCH=1 FRAMEWORKS=1; $(BIN)/python -m pytest tests/integrations/test_frameworks.py $(ARGS)

wheels: ## build a wheel for each of ARGS (python3.11 python3.13), one for all from 3.12 on and a pure one into dist/, and test each installed
	@.ci/wheels $(ARGS)

clean: ## remove what builds and tests leave; keeps .venv
	@rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache .core-*
	@rm -f inferscope/record/_native.*.so
	@find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
