# Every target sets up .venv by itself; a second run finds it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-gpu check format bench bench-cpu docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

demo: $(READY)  ## train two towers on emoji and their names, and look for drawings they have never seen (CPU, three minutes)
	@rm -rf demo
	$(BIN)/megabatch train --output demo --set evaluate_every=40
	$(BIN)/megabatch search demo "red heart" "cat face" "snowman" "strawberry" "light bulb" --sheet demo/found.png
	@echo "Written to demo: report.html (open it in a browser), found.png, model.safetensors"

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

bench: $(READY)  ## the losses beside others': values, time, memory, plots, one page (a minute)
	$(BIN)/megabatch bench --quick

bench-cpu: $(READY)  ## the CPU benchmark of the README (a quarter of an hour)
	$(BIN)/python benchmarks/loss_cpu.py

docs: $(READY)  ## the documentation site, in build/site; a dead link is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## remove what the targets made
	rm -rf .venv demo megabatch-bench build .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv (once; PyTorch is a large download)"
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
