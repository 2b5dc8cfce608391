# `make` lists what there is.  Every target sets up .venv first; when that is done already it costs
# a fraction of a second (tools/setup_env.sh).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint check-cuda check-te clean

PYTHON_VENV := .venv/bin/python
# Passed on: ARGS to the demo ("key=value ..."), PYTEST_ARGS to pytest ("tests/ops -k segment").
ARGS ?=
PYTEST_ARGS ?=
# Processes that run tests at the same time; each test may start more.
TEST_WORKERS ?= 2
PYTEST := $(PYTHON_VENV) -m pytest -n $(TEST_WORKERS) --no-loadscope-reorder
# What `make setup` installs: run, or dev for the test and lint tools as well.
GROUP ?= run
NVCC ?= nvcc

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv ready (GROUP=run or dev; variables: see tools/setup_env.sh)
	@tools/setup_env.sh $(GROUP)

demo:  ## a whole small run on this machine (ARGS="key=value ..." overrides settings)
	@tools/setup_env.sh run
	@$(PYTHON_VENV) tools/demo.py $(ARGS)

test:  ## the tests, without the slow ones (PYTEST_ARGS="-k name")
	@tools/setup_env.sh dev
	@$(PYTEST) -m "not slow" $(PYTEST_ARGS)

test-all:  ## every test this machine can run
	@tools/setup_env.sh dev
	@$(PYTHON_VENV) -m pytest $(PYTEST_ARGS)

lint:  ## ruff and mypy
	@tools/setup_env.sh dev
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m mypy

# It proves that they compile, not that they run: docs/gpu-verification.md.
check-cuda:  ## compile the CUDA kernels without a GPU (NVCC=/path/to/nvcc)
	@tools/setup_env.sh run
	@$(PYTHON_VENV) tools/native_build.py check-cuda --nvcc $(NVCC)

# Part of test-all, too.  It proves what constructors decide, not what kernels compute.
check-te:  ## tests with the real Transformer Engine, without a GPU (15 minutes the first time)
	@tools/setup_env.sh dev
	@tools/setup_te.sh python -m pytest tests/te $(PYTEST_ARGS)

clean:  ## remove builds and caches; .venv and runs/ stay
	rm -rf build dist *.egg-info megarl/_C*.so megarl/_host*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
