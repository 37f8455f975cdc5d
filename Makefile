# Every target first makes a virtual environment with all it needs: a bare machine with Python
# is enough. `make` alone lists the targets.

PYTHON  ?= python3
VENV    ?= .venv
WORKERS ?= 2
ARGS    ?=
SEEDS   ?= 3

BIN       := $(VENV)/bin
INSTALLED := $(VENV)/.installed
TRITON    := $(VENV)/.triton
RELEASE   := $(VENV)/.release

# mkdocs-material advertises its successor at every build; the versions here are pinned.
export NO_MKDOCS_2_WARNING := 1

# Half of what it takes to collect the tests is compiling them: images that say so for small
# containers (PYTHONDONTWRITEBYTECODE=1) would do that in each process of each run.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install test test-slow test-triton demo bench atlas published suites lint format types docs docs-serve dist wheel smoke chains check clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{ printf "  make %-12s %s\n", $$1, $$2 }'

install: $(INSTALLED) ## make the virtual environment

$(INSTALLED): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo 'torchzero_clip needs Python 3.10 or newer: make PYTHON=/path/to/python3 …' >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo 'This Python cannot make virtual environments: on Debian and Ubuntu, install python3-venv.' >&2; exit 1; }
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

$(TRITON): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[triton]'
	@touch $@

$(RELEASE): $(INSTALLED)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[release]'
	@touch $@

test: $(INSTALLED) ## run the tests (ARGS="-k norm" chooses)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(ARGS)

test-slow: $(INSTALLED) ## run the longer checks that have not passed at this commit (ARGS=--again)
	$(BIN)/python scripts/slow.py run --workers $(WORKERS) $(ARGS)

test-triton: $(TRITON) ## interpret the kernels for GPUs, and compile them for four, without one
	TRITON_INTERPRET=1 $(BIN)/python -m pytest -n $(WORKERS) -m "triton and not slow" tests/engines/test_operators.py tests/engines/test_triton_interpreted.py tests/engines/test_vectors_interpreted.py tests/engines/test_captured.py tests/engines/test_proof.py tests/engines/test_random_launches.py $(ARGS)
	$(BIN)/python -m pytest -n $(WORKERS) -m "triton and not slow" tests/engines/test_triton_machine.py tests/engines/test_launches.py $(ARGS)

demo: $(INSTALLED) ## watch six chains train a small language model on corrupted data
	$(BIN)/python examples/demo.py $(ARGS)

bench: $(INSTALLED) ## time a step against torch's own optimizers
	$(BIN)/python -m benchmarks.step $(ARGS)
	$(BIN)/python -m benchmarks.small

atlas: $(INSTALLED) ## what every rule does to every trouble of the gradient
	$(BIN)/python -m benchmarks.atlas $(ARGS)

published: $(INSTALLED) ## results of papers, in at most 25 minutes (SEEDS=10 takes half an hour)
	$(BIN)/python -m examples.published --seeds $(SEEDS) $(ARGS)

suites: $(INSTALLED) ## run other people's tests over our chains: make suites NAME=timm SOURCE=checkout
	$(BIN)/python scripts/suites.py $(NAME) --source $(SOURCE) $(ARGS)

lint: $(INSTALLED) ## check style, formatting and spelling
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/codespell

format: $(INSTALLED) ## format, and fix what can be fixed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(INSTALLED) ## check the types
	$(BIN)/mypy

docs: $(INSTALLED) ## build the documentation into site/
	$(BIN)/mkdocs build

docs-serve: $(INSTALLED) ## show the documentation while you write it
	$(BIN)/mkdocs serve --no-strict --livereload

dist: $(INSTALLED) ## build the wheel and the source archive into dist/
	rm -rf dist
	$(BIN)/python -m build --no-isolation

wheel: $(RELEASE) dist ## build both, check them, and install them into empty environments (downloads torch; ARGS="--torch 2.13.0")
	$(BIN)/twine check --strict dist/*
	$(BIN)/check-wheel-contents dist/*.whl
	$(BIN)/python scripts/wheel_environments.py $(ARGS)

smoke: dist ## install both, away from the source, and use them
	$(BIN)/python scripts/smoke.py

chains: $(INSTALLED) ## random chains as files, for a minute (ARGS="--seed 5000")
	$(BIN)/python scripts/chains.py --seconds 60 $(ARGS)

check: test lint types docs smoke chains ## everything that a change must pass

clean: ## remove what these targets made
	rm -rf $(VENV) site dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
