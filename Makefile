# Two commands: `make run` and `make test`. Both set up .venv first; the second call of either starts at once.
PYTHON ?= python3
DEVICE ?= auto
ARGS ?=

PY := .venv/bin/python
export OMP_NUM_THREADS ?= 1
# Named after all that decides what is installed, the folder included: an editable install breaks when moved.
STAMP := .venv/setup-$(shell cat pyproject.toml requirements/*.lock requirements/install.py | \
	{ cat; printf '%s' '$(CURDIR) $(DEVICE)'; } | sha256sum | cut -c1-16).stamp

.DEFAULT_GOAL := help
.PHONY: help setup test lint types run soak bench lock clean

help:  ## this list
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12 | sed 's/^/  make /'

setup: $(STAMP)  ## .venv with pinned packages (CPU builds unless nvidia-smi lists a GPU; DEVICE=cpu or cuda decides)

$(STAMP):
	@$(PYTHON) requirements/install.py $@ $(DEVICE)

test: lint types  ## set-up, format, lint, types, tests
	$(PY) -m pytest

lint: setup  ## ruff: format and lint
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: setup  ## mypy
	$(PY) -m mypy

run: setup  ## asynchronous GRPO, the default preset; ARGS="--trainer.steps=3 --config apps/grpo/tiny.yaml"
	$(PY) apps/grpo/main.py $(ARGS)

soak: setup  ## the tests that take minutes
	$(PY) -m pytest -m soak --timeout 1800

bench: setup  ## every benchmark of apps/bench, one after the other
	@for file in apps/bench/[a-z]*.py; do \
		echo "== $$file"; $(PY) -m apps.bench.$$(basename $$file .py) $(ARGS) || exit 1; done

lock: setup  ## requirements/cpu.lock anew, from pyproject.toml and what is installed
	$(PY) requirements/lock.py

clean:  ## everything that can be made again, except runs/ and .venv
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
