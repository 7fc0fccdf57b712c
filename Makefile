# Everything a developer types. The first call makes .venv from python3 and constraints.txt; later ones reuse it.
#
#   make demo                  train a small GPT on four Gloo ranks, and show that it equals one device
#   make test                  lint, types, and every test that is not slow (what CI runs); the tests of a file share what
#                              they trace and compile, so one worker runs them all
#   make test-all              the slow tests and every case too
#   make nightly               25,000 drawn pairs of a program and a plan, beside one device; goes on where the last run
#                              stopped (build/nightly); then a dozen architectures of the zoo, others each day;
#                              then 72 kills of runs in drawn places
#   make zoo                   two hundred architectures on a simulated mesh trained beside one device; tests/zoo/results.md;
#                              installs diffusers and torch_geometric, which nothing else needs
#   make mutants               200 changes of the source on purpose, drawn by a seed, each with the tests near it: which of
#                              them the tests notice; goes on where the last run of a commit stopped (build/mutants)
#   make campaigns             wrong programs beside the verifier, by a seed: 5,000 of what compiling makes, 2,000 of buckets,
#                              late waits and updates in place, 6,000 of orders of pipelines; fails where one that computes
#                              another number, or hangs, is accepted; goes on where the last run stopped (build/*_campaign)
#   make gpu-bench             on a GPU: each Triton kernel and a block, then training steps of three models, beside
#                              torch.compile, eager and Liger-Kernel
#   make kernel-table          registers, shared memory and spills of each Triton kernel, compiled without a GPU
#   make docs                  the documentation as a site in build/site; a warning is an error
#   make lint | make format    check the style, and the prose (python -m tests.prose) | put the style right
#   make test PYTHON=python3   use this interpreter and what is installed there (a GPU machine): no .venv
#
# Where the machine's pip would fetch the CUDA build of torch and you want the CPU one:
#   make test PIP_FLAGS="--extra-index-url https://download.pytorch.org/whl/cpu"

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo docs test test-all nightly zoo mutants campaigns gpu-bench kernel-table lint format types pytest clean

VENV := .venv
PIP_FLAGS ?=
WORKERS ?= 2
HYPOTHESIS_PROFILE ?= ci
export HYPOTHESIS_PROFILE
export OMP_NUM_THREADS ?= 1
# Every rank of a test is a process of its own, and starts in a second less where bytecode may be kept.
unexport PYTHONDONTWRITEBYTECODE

ifeq ($(origin PYTHON),command line)
READY :=
ZOO_READY :=
DOCS_READY :=
else
PYTHON := $(VENV)/bin/python
READY := $(VENV)/.installed
ZOO_READY := $(VENV)/.installed-zoo
DOCS_READY := $(VENV)/.installed-docs
endif

help:
	@sed -n '/^# Everything/,/^$$/s/^# \{0,1\}//p' Makefile

$(VENV)/.installed: pyproject.toml constraints.txt
	@if [ ! -x $(VENV)/bin/python ]; then \
	  for python in python3.11 python3 python3.12 python3.13; do \
	    if $$python -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      echo "make: creating $(VENV) with $$($$python --version)"; \
	      $$python -m venv $(VENV); break; \
	    fi; \
	  done; \
	fi
	@[ -x $(VENV)/bin/python ] || { echo "make: no Python >= 3.11 with the venv module was found; install one, e.g. python3.11" >&2; exit 1; }
	@echo "make: installing autoshard and the versions of constraints.txt into $(VENV) (a few minutes the first time)"
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev]'
	@touch $@

$(VENV)/.installed-zoo: $(VENV)/.installed
	@echo "make: installing the other libraries of the zoo, diffusers and torch_geometric"
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev,zoo]'
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed
	@echo "make: installing mkdocs-material and mkdocstrings"
	@$(VENV)/bin/python -m pip install -qq --disable-pip-version-check $(PIP_FLAGS) -c constraints.txt -e '.[dev,docs]'
	@touch $@

demo: $(READY)
	$(PYTHON) -m torch.distributed.run --standalone --nproc-per-node 4 examples/train_gpt.py

test: lint types
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist loadfile --durations 20 -m "not slow"

test-all: lint types
	$(PYTHON) -m pytest -q -n $(WORKERS) --dist loadfile

nightly: $(ZOO_READY)
	$(PYTHON) -m tests.nightly --jobs $(WORKERS)
	$(PYTHON) -m tests.zoo --sample 12 --jobs $(WORKERS)
	$(PYTHON) -m tests.drawn_kills --seed $$RANDOM

zoo: $(ZOO_READY)
	$(PYTHON) -m tests.zoo --jobs $(WORKERS)

mutants: $(READY)
	$(PYTHON) -m tests.mutants

campaigns: $(READY)
	$(PYTHON) -m tests.benchmarks.mutation_campaign --jobs $(WORKERS)
	$(PYTHON) -m tests.benchmarks.overlap_campaign --jobs $(WORKERS)
	$(PYTHON) -m tests.benchmarks.schedule_campaign

gpu-bench: $(READY)
	$(PYTHON) -m tests.benchmarks.gpu_kernels
	$(PYTHON) -m tests.benchmarks.gpu_training

kernel-table: $(READY)
	$(PYTHON) -m tests.benchmarks.kernel_resources

docs: $(DOCS_READY)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build --strict --quiet
	@echo "make: the site is in build/site"

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m tests.prose

types: $(READY)
	$(PYTHON) -m pyright --pythonpath "$$($(PYTHON) -c 'import sys; print(sys.executable)')"

format: $(READY)
	$(PYTHON) -m ruff check --fix .
	$(PYTHON) -m ruff format .

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .hypothesis build dist *.egg-info
