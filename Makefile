# Two commands for users: `make quickstart` and `make test`. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 2

.PHONY: help quickstart test test-vllm lint types check setup clean bench-import bench-engine bench-serve \
        environment-run environment-dev

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

quickstart: environment-run ## watch an unmodified agent solve small tasks against a small model
	@$(BIN)/polar quickstart $(ARGS)

test: environment-dev ## run every test (about five minutes on two cores)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-vllm: environment-dev ## run against a real vLLM on the CPU (needs 4 GB of disk, 5 minutes the first time)
	@$(BIN)/python -m pytest suites/vllm $(ARGS)

lint: environment-dev ## ruff, lint and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: environment-dev ## mypy, strict
	@$(BIN)/mypy

check: lint types test ## what CI runs

setup: environment-dev ## only make the environment

bench-import: environment-dev ## `import polar` and `polar --help`
	@$(BIN)/python benchmarks/bench_import.py

bench-engine: environment-dev ## embedded engine against plain model.generate
	@$(BIN)/python benchmarks/bench_engine.py

bench-serve: environment-dev ## memory of an idle server
	@$(BIN)/python benchmarks/bench_serve.py

clean: ## remove the environment and run data of this clone (downloads stay in the cache)
	rm -rf $(VENV) .polar .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Seconds where nothing has changed or another clone has made the same environment before.
environment-run:
	@$(PYTHON) tools/environment.py engine

environment-dev:
	@$(PYTHON) tools/environment.py engine,dev
