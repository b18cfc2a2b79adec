# Two commands for users: `make quickstart` and `make test`. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 2

.PHONY: help quickstart test test-vllm test-containers test-ray lint types check setup clean bench-import bench-engine bench-gateway \
        bench-lifecycle bench-serve bench-tasksets bench-control-plane bench-trajectory \
        environment-run environment-dev

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

quickstart: environment-run ## watch an unmodified agent solve small tasks against a small model
	@$(BIN)/polar quickstart $(ARGS)

test: environment-dev ## run every test (about five minutes on two cores)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-vllm: environment-dev ## run against a real vLLM on the CPU (needs 4 GB of disk, 5 minutes the first time)
	@$(BIN)/python -m pytest suites/vllm $(ARGS)

test-containers: environment-dev ## run sandboxes on real Docker and podman (needs both installed, and root)
	@$(BIN)/python -m pytest suites/containers $(ARGS)

test-ray: environment-ray ## run a fleet on a real Ray cluster of three raylets (installs Ray the first time)
	@$(BIN)/python -m pytest suites/ray $(ARGS)

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

bench-gateway: environment-dev ## the gateway against direct calls and its peers (installs them the first time)
	@$(BIN)/python benchmarks/bench_gateway.py $(ARGS)

bench-lifecycle: environment-dev ## how busy run slots are, what waiting and scheduling cost
	@PYTHONPATH=. $(BIN)/python benchmarks/bench_lifecycle.py

bench-trajectory: environment-dev ## traces from captures: speed, growth, size, and finding conversations
	@$(BIN)/python benchmarks/bench_trajectory.py

bench-control-plane: environment-dev ## submitting, leasing and completing over REST, on SQLite and PostgreSQL
	@$(BIN)/python benchmarks/bench_control_plane.py

bench-serve: environment-dev ## memory of an idle server
	@$(BIN)/python benchmarks/bench_serve.py

bench-tasksets: environment-dev ## 10,000 rows to tasks, and memory while a dataset is written
	@PYTHONPATH=. $(BIN)/python benchmarks/bench_tasksets.py

clean: ## remove the environment and run data of this clone (downloads stay in the cache)
	rm -rf $(VENV) .polar .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Seconds where nothing has changed or another clone has made the same environment before.
environment-run:
	@$(PYTHON) tools/environment.py engine

environment-dev:
	@$(PYTHON) tools/environment.py engine,dev

environment-ray:
	@$(PYTHON) tools/environment.py engine,dev,ray
