# Two commands for users: `make quickstart` and `make test`. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 2
ROUNDS ?= 20

# Nothing here makes a file of its own name.
.PHONY: $(shell sed -n 's/^\([a-z-]*\):.*/\1/p' $(MAKEFILE_LIST))

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-19s %s\n", $$1, $$2}'

quickstart: environment-run ## watch an unmodified agent solve small tasks against a small model
	@$(BIN)/polar quickstart $(ARGS)

test: environment-dev ## run every test (twenty minutes on two cores)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

test-random: environment-dev ## search for counterexamples: property-based tests with new seeds (ROUNDS=20, SEED repeats; half an hour)
	@files=$$(grep -rl --include='test_*.py' hypothesis tests); for round in $$(seq $(ROUNDS)); do \
	  seed=$${SEED:-$$($(BIN)/python -c 'import secrets; print(secrets.randbelow(2**32))')}; \
	  echo "round $$round of $(ROUNDS); repeat it with: make test-random ROUNDS=1 SEED=$$seed"; \
	  $(BIN)/python -m pytest -m hypothesis --hypothesis-profile=random --hypothesis-seed=$$seed \
	    -n $(WORKERS) -q $(ARGS) $$files || exit 1; \
	done

test-wheel: environment-dev ## build the wheel, install it with pip alone, and use it in an empty directory (four minutes)
	@$(BIN)/python -m pytest suites/wheel $(ARGS)

test-vllm: environment-dev ## run against a real vLLM on the CPU (needs 4 GB of disk, 5 minutes the first time)
	@$(BIN)/python -m pytest suites/vllm $(ARGS)

test-checkpoint: environment-dev ## serve a model of your own from its directory (POLAR_CHECKPOINT) and run a loop of tools, on a CPU or a GPU
	@$(BIN)/python -m pytest -s suites/checkpoints $(ARGS)

test-families: environment-dev ## serve a tiny model with the real tokenizer of each family: tokens mode and a loop of tools (four minutes)
	@$(BIN)/python -m pytest -s suites/families $(ARGS)

test-branching: environment-dev ## sessions of the seven harnesses are replayed, branched and, after kill -9 of their node, resumed (five minutes)
	@$(BIN)/python -m pytest -n $(WORKERS) suites/branching $(ARGS)

test-agents: environment-dev ## agents of presets (aider, Copilot, …) run for real, and every harness calls a task's own tools (2 GB, ten minutes)
	@$(BIN)/python -m pytest -n $(WORKERS) suites/agents $(ARGS)

test-containers: environment-dev ## run sandboxes on real Docker and podman (needs both installed, and root)
	@$(BIN)/python -m pytest suites/containers $(ARGS)

test-faults: environment-dev ## 500 sessions while everything fails around them (POLAR_FAULTS_SEED repeats a run)
	@$(BIN)/python -m pytest -s suites/faults $(ARGS)

test-fuzz: environment-dev ## 100,000 malformed requests over every dialect and REST route (POLAR_FUZZ_REQUESTS, POLAR_FUZZ_SEED)
	@$(BIN)/python -m pytest -s suites/fuzz $(ARGS)

test-attacks: environment-dev ## agents that cheat, against every evaluator: no reward may be forged
	@$(BIN)/python -m pytest -n $(WORKERS) suites/attacks $(ARGS)

test-soak: environment-dev ## 10,000 sessions, after which nothing is left and no process has grown (POLAR_SOAK_SESSIONS)
	@$(BIN)/python -m pytest -s suites/soak $(ARGS)

test-ray: environment-ray ## run a fleet on a real Ray cluster of three raylets (installs Ray the first time)
	@$(BIN)/python -m pytest suites/ray $(ARGS)

test-distributed: environment-dev ## train with 2 and 4 processes and with one, and kill ranks (gloo, on a CPU; five minutes on two cores)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest suites/distributed $(ARGS)

test-gpu: environment-dev ## the embedded engine and the trainer on a CUDA device (needs one)
	@$(BIN)/python -m pytest suites/gpu --ignore suites/gpu/vllm $(ARGS)

test-gpu-vllm: environment-dev ## the gateway in front of a vLLM that serves on a CUDA device (POLAR_VLLM_URL, POLAR_VLLM_MODEL its directory)
	@$(BIN)/python -m pytest suites/gpu/vllm $(ARGS)

test-published: environment-dev ## rehearse the published set-up in small: Pi, engine, server, trainer and every push (13 minutes on two busy cores)
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -s suites/published $(ARGS)

test-bridges: environment-dev ## run bridges with TRL, verl, SkyRL, AReaL and NeMo Gym themselves (installs them the first time)
	@$(BIN)/python -m pytest suites/bridges $(ARGS)

test-trackers: environment-dev ## a run's numbers and rollouts in TensorBoard, W&B, MLflow and trackio themselves, offline (installs them the first time)
	@$(BIN)/python -m pytest suites/trackers $(ARGS)

wheel: environment-run ## the wheel of this clone into dist/
	@$(BIN)/python tools/wheel.py dist

docs: environment-dev ## the documentation site into site/; a warning or a broken link is an error
	@NO_MKDOCS_2_WARNING=1 PYTHONPATH=. $(BIN)/mkdocs build $(ARGS)

locks: environment-dev ## lock the packages of harnesses anew, with hashes, after a version has changed
	@$(BIN)/python -m tools.locks

lint: environment-dev ## ruff, lint and format; and that the source has not outgrown what it was brought to
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .
	@$(PYTHON) -m tools.house --check

audit: ## look every pinned package up in the databases of known vulnerabilities (says so where none answers)
	@$(PYTHON) -m tools.audit

test-resolution: ## resolve Polar together with the newest vLLM, TRL and verl; a conflict fails (a minute)
	@$(PYTHON) -m tools.resolution

house: ## lines, files, long functions and duplicate names of the source beside their targets (ARGS=--check fails)
	@$(PYTHON) -m tools.house --lists $(ARGS)

types: environment-dev ## mypy, strict
	@$(BIN)/mypy

check: lint types docs test ## what CI runs

setup: environment-dev ## only make the environment

bench-import: environment-dev ## `import polar` and `polar --help`
	@$(BIN)/python -m benchmarks.bench_import

bench-rendering: environment-dev ## first renders and extensions of long conversations, by family and by template
	@$(BIN)/python -m benchmarks.bench_rendering

bench-engine: environment-dev ## embedded engine against plain model.generate
	@$(BIN)/python -m benchmarks.bench_engine

bench-gateway: environment-dev ## the gateway against direct calls and its peers (installs them the first time)
	@$(BIN)/python -m benchmarks.bench_gateway $(ARGS)

bench-lifecycle: environment-dev ## how busy run slots are, what waiting, scheduling and ending cost
	@$(BIN)/python -m benchmarks.bench_lifecycle

bench-trajectory: environment-dev ## traces from captures: speed, growth, size, and finding conversations
	@$(BIN)/python -m benchmarks.bench_trajectory

bench-training: environment-dev ## the same sessions trained in three layouts; full size where there is a GPU
	@$(BIN)/python -m benchmarks.bench_training $(ARGS)

bench-control-plane: environment-dev ## submitting, leasing and completing over REST, on SQLite and PostgreSQL
	@$(BIN)/python -m benchmarks.bench_control_plane

bench-dashboard: environment-dev ## the overview and the lists at 100,000 sessions
	@$(BIN)/python -m benchmarks.bench_dashboard

bench-replay: environment-dev ## sessions of the seven harnesses and their replays (twenty minutes)
	@$(BIN)/python -m benchmarks.bench_replay $(ARGS)

bench-serve: environment-dev ## memory of an idle server
	@$(BIN)/python -m benchmarks.bench_serve

bench-tasksets: environment-dev ## 10,000 rows to tasks, and memory while a dataset is written
	@$(BIN)/python -m benchmarks.bench_tasksets

clean: ## remove the environment and run data of this clone (downloads stay in the cache)
	rm -rf $(VENV) .polar site .pytest_cache .mypy_cache .ruff_cache .hypothesis

# Seconds where nothing has changed or another clone has made the same environment before.
environment-run:
	@$(PYTHON) tools/environment.py engine,train

environment-dev:
	@$(PYTHON) tools/environment.py engine,train,dev

environment-ray:
	@$(PYTHON) tools/environment.py engine,train,dev,ray
