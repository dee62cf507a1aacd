# Every target sets up .venv by itself; a second run finds it ready.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready
DEMO_READY := .venv/.ready-demo
# Two workers of one thread each use two cores. Each begins with half of the tests, and takes from the other when it is done.
PYTEST := $(BIN)/python -m pytest -n 2 --dist worksteal

.DEFAULT_GOAL := help
.NOTPARALLEL:  # two installations into one .venv would break it
.PHONY: help demo test test-thorough test-all test-rounding test-gpu sanitize-gpu check format bench bench-cpu docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 16

demo: $(DEMO_READY)  ## two towers learn emoji and their names, then search; fast / slow two cores: install 1 / 3 min, train 70 / 120 s; recall@1 37 %, @10 61 %
	@rm -rf demo
	$(BIN)/megabatch train --output demo --set evaluate_every=20
	$(BIN)/megabatch search demo "red heart" "cat face" "snowman" "strawberry" "light bulb" --sheet demo/found.png
	@echo "Written to demo: report.html (open it in a browser), found.png, model.safetensors"

# Tests start dozens of processes. Containers often forbid bytecode, and then each process compiles PyTorch's modules anew.
test test-thorough test-rounding: export PYTHONDONTWRITEBYTECODE =
test test-thorough: export OMP_NUM_THREADS ?= 1
test: $(READY)  ## the tests (CPU, minutes)
	$(PYTEST)

test-thorough: $(READY)  ## what `make test` leaves out: the rest of each grid, more random examples, what starts Python anew
	$(PYTEST) -m '(thorough or hypothesis) and not gpu'

test-all: test test-thorough  ## both

# On another processor PyTorch and NumPy choose other instructions, and sum in another order.
NUMERICAL := tests/tiles tests/losses tests/ring/test_ring.py tests/test_accuracy.py tests/test_pairwise.py tests/test_transforms.py
# The second pass changes only how PyTorch rounds, so it leaves out kernels, which NumPy interprets.
# `make test-rounding CASES='quick or not thorough'` rounds whole grids differently, in a quarter of an hour.
CASES ?= not thorough
test-rounding: $(READY)  ## the numerical tests as older processors and other numbers of threads round
	OPENBLAS_CORETYPE=Haswell MKL_ENABLE_INSTRUCTIONS=AVX2 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 OMP_NUM_THREADS=1 \
	    $(PYTEST) -m '($(CASES)) and not gpu' $(NUMERICAL)
	ATEN_CPU_CAPABILITY=default OMP_NUM_THREADS=2 \
	    $(PYTEST) -m 'not thorough and not gpu' -k 'not triton and not kernel' $(NUMERICAL)

test-gpu:  ## the tests that use a GPU, several at a time, with the python that is active
	PYTHONPATH=src $(PYTHON) tools/test_gpu.py

sanitize-gpu:  ## every kernel under compute-sanitizer, on a GPU, with the python that is active
	PYTHONPATH=src $(PYTHON) tools/sanitize_gpu.py

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

# The demo's packages are some of the developers', so either may be installed first.
$(DEMO_READY): pyproject.toml constraints.txt
	@echo "Setting up .venv for the demo, once: up to 3.1 GB to download, nearly all of it PyTorch with its CUDA libraries"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python tools/install.py '.[emoji,train]' 3100
	@touch $@

$(READY): pyproject.toml constraints.txt
	@echo "Setting up .venv for developers, once: up to 3.4 GB to download, nearly all of it PyTorch with its CUDA libraries"
	@$(PYTHON) -m venv .venv
	@$(BIN)/python tools/install.py '.[dev]' 3400
	@touch $(DEMO_READY) $@
