# Every target sets up .venv by itself; a second run finds it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu check format bench docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(READY)  ## the same loss as open_clip's, its time and memory against the batch, one plot (CPU, a minute or two)
	$(BIN)/python benchmarks/loss_cpu.py --batches 1024 2048 4096 8192 --rounds 1 --output demo

test: $(READY)  ## the tests (CPU, minutes)
	$(BIN)/python -m pytest

test-slow: $(READY)  ## the tests that take longer
	$(BIN)/python -m pytest -m slow

test-gpu:  ## the tests that need a GPU, with the python that is active; they skip where there is none
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu -rs tests/gpu

check: $(READY)  ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(READY)  ## rewrite the files in the project's format
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## the CPU benchmark of the README (a quarter of an hour)
	$(BIN)/python benchmarks/loss_cpu.py

docs: $(READY)  ## the documentation site, in build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## remove what the targets made
	rm -rf .venv demo build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (once; PyTorch is a large download)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
