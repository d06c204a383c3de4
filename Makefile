# `make test` and `make train` need Python 3.11 or later and, the first time, a network.

PYTHON ?= python3
VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
TRAINS := $(VENV)/.trains
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := help

# Without its cache of compiled modules Python takes twice as long to collect the tests, in every process of them.
unexport PYTHONDONTWRITEBYTECODE
.PHONY: help test test-slow check train bench bench-kernels kernel-report convergence test-gpu bench-gpu clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1\t\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 16

# tests of several ranks often wait, so others run meanwhile
WORKERS = $(shell expr $$(nproc) + 2)
PART_kernels := tests/conformance tests/ops tests/patches tests/toolkit
PART_planner := tests/planner tests/sync/reporting
PART_package := bench/tests tests/package tests/support
PART_sync := $(filter-out $(PART_planner),$(wildcard tests/sync/*))
test: $(INSTALLED) ## tests that need neither a GPU nor much time; PART=kernels, planner, sync or package runs a part
	$(if $(PART),$(if $(PART_$(PART)),,$(error PART must be kernels, planner, sync or package, got $(PART))))
	$(VENV_PYTHON) -m pytest -m "not slow and not gpu" --numprocesses $(WORKERS) --dist worksteal $(PART_$(PART))

test-slow: $(INSTALLED) ## the long tests
	$(VENV_PYTHON) -m pytest -m "slow and not gpu" --numprocesses auto --dist worksteal

# Environments with the oldest versions that pyproject.toml allows, those of constraints.txt, and the newest ones. Each
# is made anew when these files change, or after `make clean`.
VERSIONS ?= oldest pinned newest
SAMPLE ?= 10
PYTHON_oldest ?= python3.11
PYTHON_pinned ?= python3.12
PYTHON_newest ?= python3.13
.PHONY: test-versions $(VERSIONS:%=test-with-%)
test-versions: ## one case in SAMPLE of every test, with the VERSIONS oldest, pinned, newest; 3 GB of downloads for each
	$(MAKE) --keep-going $(VERSIONS:%=test-with-%)

$(VERSIONS:%=test-with-%): test-with-%: build/versions/%/.installed
	$(<D)/bin/python -m pytest -m "not slow and not gpu" --sample $(SAMPLE) --numprocesses $(WORKERS) --dist worksteal

build/versions/%/.installed: build/versions/%.txt pyproject.toml
	$(PYTHON_$*) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --constraint $< --editable '.[test,bench]'
	touch $@

build/versions/oldest.txt: pyproject.toml
	mkdir -p $(@D)
	sed -n 's/^ *"\(numpy\|torch\|triton\)>=\([0-9.]*\).*/\1==\2/p' $< > $@

build/versions/pinned.txt: constraints.txt
	mkdir -p $(@D)
	cp $< $@

build/versions/newest.txt:
	mkdir -p $(@D)
	touch $@

# Environments with the oldest releases of trainers that pyproject.toml allows, with the newest ones of the package index,
# and with torchft of last night.
INTEGRATIONS ?= oldest newest nightly
TRAINERS_oldest := .[test,accelerate,lightning,torchft,torchtitan,transformers]
TRAINERS_newest := $(TRAINERS_oldest)
TRAINERS_nightly := .[test] torchft-nightly
.PHONY: test-integrations $(INTEGRATIONS:%=test-integrations-with-%)
test-integrations: ## trainings in other packages' trainers, with the INTEGRATIONS oldest, newest, nightly
	$(MAKE) --keep-going $(INTEGRATIONS:%=test-integrations-with-%)

$(INTEGRATIONS:%=test-integrations-with-%): test-integrations-with-%: build/integrations/%/.installed
	$(<D)/bin/python -m pytest --numprocesses 1 tests/sync/integrations bench/tests/test_finetune.py
	$(<D)/bin/python -m pytest tests/package/test_pages.py -k trainers

build/integrations/%/.installed: build/integrations/%.txt pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear $(@D)
	$(@D)/bin/python -m pip install --constraint constraints.txt --constraint $< --editable $(TRAINERS_$*)
	touch $@

build/integrations/oldest.txt: pyproject.toml
	mkdir -p $(@D)
	sed -n 's/^\(accelerate\|lightning\|torchft\|torchtitan\|transformers\) = \["\([a-z]*\)>=\([0-9.]*\)".*/\2==\3/p' $< > $@

build/integrations/newest.txt build/integrations/nightly.txt:
	mkdir -p $(@D)
	touch $@

check: $(INSTALLED) ## linter, formatter, types
	$(VENV_PYTHON) -m ruff check
	$(VENV_PYTHON) -m ruff format --check
	$(VENV_PYTHON) -m mypy

.PHONY: docs docs-links tables
SPHINX = $(VENV_PYTHON) -m sphinx --doctree-dir build/doctrees --fail-on-warning --keep-going --quiet
docs: $(INSTALLED) ## build the documentation into build/html and run the examples of docstrings; no network needed
	$(SPHINX) --builder html docs build/html
	$(SPHINX) --builder doctest docs build/doctest

docs-links: $(INSTALLED) ## check the links from the documentation to other sites; needs a network
	$(SPHINX) --builder linkcheck docs build/linkcheck

tables: $(INSTALLED) ## write the generated parts of the documentation
	$(VENV_PYTHON) -m docs.tables

train: $(TRAINS) ## train over a slow link with and without compression, compare
	$(VENV_PYTHON) -m examples.compare

.PHONY: dist
dist: $(INSTALLED) ## build both distributions into build/dist, and try the wheel in an empty environment; needs a network
	rm -rf build/dist build/dist-env
	$(VENV_PYTHON) -m build --outdir build/dist
	$(VENV_PYTHON) -m venv build/dist-env
	build/dist-env/bin/python -m pip install --constraint constraints.txt build/dist/*.whl
	cd build && dist-env/bin/python -c "import torch, gckernels; grad = torch.randn(1000); \
	payload = gckernels.encode(gckernels.Cast16(), grad); print('gckernels', gckernels.__version__, payload.numel(), 'bytes')"

bench: bench-kernels ## measure compressors, launches and the hook on the CPU
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc-per-node 2 -m bench.sync.hook_overhead
	$(VENV_PYTHON) -m bench.sync.build_time
	$(VENV_PYTHON) -m bench.kernels.launch_cost

kernel-report: $(INSTALLED) ## registers, instructions, busy pipes, ... of every kernel; UPDATE=1 keeps them
	$(VENV_PYTHON) -m bench.kernels.kernel_report $(if $(UPDATE),--update)

convergence: $(INSTALLED) ## train with every compressor, compare with none; tens of minutes
	$(VENV_PYTHON) -m bench.training.convergence

bench-kernels: $(INSTALLED) ## the compressors alone: bandwidths of encoding, decoding and recoding; tens of minutes
	mkdir -p build
	$(VENV_PYTHON) -m pytest bench/kernels --benchmark-only --benchmark-json build/kernels.json --benchmark-disable-gc \
	--benchmark-min-time 0.002 --benchmark-max-time 0.2 --benchmark-columns median,iqr,rounds
	$(VENV_PYTHON) -m bench.kernels.microbench build/kernels.json

.PHONY: bench-planner
bench-planner: $(INSTALLED) ## selection times and predicted steps of all policies on published traces; minutes
	$(VENV_PYTHON) -m bench.planner.published

.PHONY: bench-links
bench-links: $(INSTALLED) ## training steps on throttled links, minutes; needs root; RANKS=4
	$(VENV_PYTHON) -m bench.sync.steps --networks $(or $(RANKS),2) --models transformer_10m --rates 200mbit 1gbit none --budget-s 60

.PHONY: bench-auto
bench-auto: $(INSTALLED) ## attachments that choose their plan against everything else, on throttled links; hours, can be resumed; needs root
	$(VENV_PYTHON) -m bench.sync.auto --resume --networks $(or $(NETWORKS),2 4 2x2)
	$(VENV_PYTHON) -m bench.sync.drift --resume
	$(VENV_PYTHON) -m bench.training.time_to_accuracy --resume
	$(VENV_PYTHON) -m bench.training.time_to_accuracy --table

# The environment lives in .venv and is made anew only when what it depends on changes. Everything
# is installed through constraints.txt, so that two machines get the same versions: first what a training needs, then
# what tests, checks and documents need.
$(TRAINS): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV_PYTHON) -m pip install --constraint constraints.txt --editable .
	touch $@

$(INSTALLED): $(TRAINS)
	$(VENV_PYTHON) -m pip install --constraint constraints.txt --editable '.[dev]'
	touch $@

# Targets for a machine with a GPU. They use $(PYTHON) as it is, with the torch and Triton that
# fit the card, and install nothing: the checkout itself is put on the path. The kernels must run
# compiled, so Triton's interpreter is switched off whatever the caller's environment says.
# They write to the folder OUT and end by themselves within the minutes that they name: what no longer
# fits is left out, and said so. PARTS="..." runs some of their parts.
OUT ?= bench/results/cuda
ON_GPU = env -u TRITON_INTERPRET BENCH_OUT="$(OUT)" PYTHONPATH="$(CURDIR)$${PYTHONPATH:+:$$PYTHONPATH}" $(PYTHON)

.PHONY: gpu-light
gpu-light: has-gpu ## first light on a GPU: bandwidth, what compiles, whether bits are right; 4 minutes
	$(ON_GPU) -m bench.gpu.light $(PARTS)

test-gpu: has-gpu ## the kernels, compiled, on this machine's GPU; 6 minutes
	$(ON_GPU) -m bench.gpu.tests $(PARTS)

.PHONY: test-gpu-nccl
test-gpu-nccl: has-gpu ## training on several ranks that share this machine's GPU; 5 minutes
	$(ON_GPU) -m bench.gpu.nccl $(PARTS)

bench-gpu: has-gpu ## measure the compressors on this machine's GPU; 9 minutes
	$(ON_GPU) -m bench.gpu.bench $(PARTS)

.PHONY: has-gpu
has-gpu: # without a GPU every test would be skipped, which looks like success
	@$(ON_GPU) -c 'import sys, torch; torch.cuda.is_available() or sys.exit("no CUDA device")'

clean: ## remove what was built and cached; the environment in .venv stays
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .benchmarks
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
