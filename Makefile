# `make demo` and `make test` work on a fresh machine: each makes .venv and installs what it needs.
#
# PYTHON  the Python to make .venv from; a torch that is already installed there is used
# VENV    where the environment goes

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest

.PHONY: setup setup-dev demo test lint typecheck chaos bench compile clean
.DEFAULT_GOAL := help

help:
	@echo "make demo     train digits with a killed worker, evaluate, serve (installs what it needs)"
	@echo "make test     unit and integration tests"
	@echo "make lint     ruff, mypy --strict, import rules"
	@echo "make chaos    minutes of random kills"
	@echo "make bench    every benchmark"
	@echo "make compile  write the compiled YAML of all components and pipelines"

# The pins hold for everything but a torch that the chosen Python already has. That one is found through a path file, which
# works for a torch in a virtual environment, too (--system-site-packages would look past it).
define make_environment
	@$(PYTHON) -m venv $(VENV)
	@if torch=$$($(PYTHON) -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))' 2>/dev/null); then \
		echo "using the torch in $$torch"; \
		echo "$$torch" > "$$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')/zz-torch.pth"; \
		grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt; \
	else \
		cp constraints.txt $(VENV)/constraints.txt; \
	fi
endef

$(VENV)/.installed: pyproject.toml constraints.txt
	$(make_environment)
	@echo "installing (two minutes on a fresh machine) …"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[serve]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(VENV)/constraints.txt -e '.[serve,dev]'
	@touch $@

setup: $(VENV)/.installed

setup-dev: $(VENV)/.installed-dev

demo: setup
	$(BIN)/kfp-elastic pipeline run digits --local --kill-worker

# Jobs that are killed, stopped and cut off get the machine for themselves; the rest shares it.
SHARING := $(addprefix tests/integration/,agent evaluation launching membership pages pipelines preprocessing serving test_packaging.py)
ALONE := $(filter-out $(SHARING) %/__pycache__,$(wildcard tests/integration/*))

test: setup-dev
	$(PYTEST) -n 2 tests/unit
	$(PYTEST) -n 2 --dist loadfile $(SHARING)
	$(PYTEST) $(ALONE)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

chaos: setup-dev
	$(PYTEST) tests/chaos

bench: setup-dev
	@for program in benchmarks/[a-z]*.py; do echo "== $$program"; $(BIN)/python $$program || exit 1; done

compile: setup
	$(BIN)/python -m kfp_elastic.pipelines.compiling

clean:
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache
