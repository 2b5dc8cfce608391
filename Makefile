# `make` lists what there is.  Every target sets up .venv first; when that is done already it costs
# a fraction of a second (tools/setup_env.sh).
SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help setup demo test test-all lint check-cuda clean

PYTHON_VENV := .venv/bin/python
# Passed on: ARGS to the demo ("key=value ..."), PYTEST_ARGS to pytest ("tests/ops -k segment").
ARGS ?=
PYTEST_ARGS ?=
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
	@$(PYTHON_VENV) -m pytest -m "not slow" $(PYTEST_ARGS)

test-all:  ## every test this machine can run
	@tools/setup_env.sh dev
	@$(PYTHON_VENV) -m pytest $(PYTEST_ARGS)

lint:  ## ruff and mypy
	@tools/setup_env.sh dev
	@$(PYTHON_VENV) -m ruff check .
	@$(PYTHON_VENV) -m mypy

# torch's stable ABI needs no CUDA headers of torch's own, so the kernels compile, unlinked, against a
# CPU build of torch.  It proves that they compile, not that they run: docs/gpu-verification.md.
check-cuda:  ## compile the CUDA kernels without a GPU
	@tools/setup_env.sh run
	@command -v $(NVCC) >/dev/null || { echo "check-cuda: $(NVCC) not found; set NVCC=/path/to/nvcc"; exit 1; }
	@set -e; object=$$(mktemp --suffix=.o); trap 'rm -f $$object' EXIT; \
	include=$$(echo .venv/lib/python3.*/site-packages/torch/include); \
	target=$$(sed -n 's/^TORCH_TARGET_VERSION = "\(.*\)"/\1/p' setup.py); \
	for source in csrc/cuda/*.cu; do \
	  for sm in 90 100; do \
	    $(NVCC) -c -std=c++17 --fmad=false -DUSE_CUDA -DTORCH_TARGET_VERSION=$$target -isystem $$include \
	      -gencode arch=compute_$$sm,code=sm_$$sm --Werror all-warnings -o $$object $$source; \
	    echo "$$source: compiles for sm_$$sm"; \
	  done; \
	done

clean:  ## remove builds and caches; .venv and runs/ stay
	rm -rf build dist *.egg-info megarl/_C*.so megarl/_host*.so .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
