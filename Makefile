# Two commands for users: `make quickstart` and `make test`. Each does all its own set-up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
WORKERS ?= 2

.PHONY: help quickstart test lint types check setup clean bench-import bench-engine bench-serve

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F':.*## ' '{printf "  make %-14s %s\n", $$1, $$2}'

quickstart: $(VENV)/.ready-run ## watch an unmodified agent solve small tasks against a small model
	@$(BIN)/polar quickstart $(ARGS)

test: $(VENV)/.ready-dev ## run every test (about ten minutes on two cores)
	@$(BIN)/python -m pytest -n $(WORKERS) --dist loadgroup $(ARGS)

lint: $(VENV)/.ready-dev ## ruff, lint and format
	@$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.ready-dev ## mypy, strict
	@$(BIN)/mypy

check: lint types test ## what CI runs

setup: $(VENV)/.ready-dev ## only make the environment

bench-import: $(VENV)/.ready-dev ## `import polar` and `polar --help`
	@$(BIN)/python benchmarks/bench_import.py

bench-engine: $(VENV)/.ready-dev ## embedded engine against plain model.generate
	@$(BIN)/python benchmarks/bench_engine.py

bench-serve: $(VENV)/.ready-dev ## memory of an idle server
	@$(BIN)/python benchmarks/bench_serve.py

clean: ## remove the environment and run data of this clone (downloads stay in the cache)
	rm -rf $(VENV) .polar .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: Polar needs Python 3.11 or newer; name one with: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@echo "making $(VENV) …"
	@$(PYTHON) -m venv $(VENV) || \
	  { echo "error: python's venv module does not work here (on Debian: apt-get install python3-venv)"; exit 1; }

define install
	@echo "installing Python packages ($(1)) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(1)]' || \
	  { echo "error: pip could not install .[$(1)]; check the network and pip's index settings, then run make again"; exit 1; }
	@touch $@
endef

$(VENV)/.ready-run: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,engine)

$(VENV)/.ready-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(call install,engine$(comma)dev)
	@touch $(VENV)/.ready-run

comma := ,
