# make demo         images with and without the accelerator, compared; DEMO_MODEL=path takes your own model
# make quick        for a change: ruff, mypy, the rules of the house, and the tests of the folder that changed; a minute
# make test         ruff, mypy, the whole CPU suite with the steps of a user on small pages of the WebUIs' two Gradios, and
#                   the kernels in Triton's interpreter; the last line has the total
# make test-pages   the same steps in a real browser, and by keyboard alone; CHROMIUM=/usr/bin/chromium, AXE=axe.min.js
# make test-long    make test with all cases: also those marked long, whole products of parameters, and longer random runs
# make test-coarse-clock  the CPU suite on clocks that move in steps of STEP=0.004 seconds, as some virtual machines' do
# make test-stack   the CPU suite on another torch: TORCH=2.5.1, one of those in requirements-stack
# make test-floor   the CPU suite on the oldest torch served, 2.1.2
# make test-diffusers  diffusers' own tests on accelerated models: DIFFUSERS=path of a checkout of huggingface/diffusers
# make soak         EVENTS=20000 random events, SEED=0 the first seed; a failure names the command that plays it again
# make sanitizer    the kernels' GPU tests under compute-sanitizer of the CUDA toolkit, logs into sanitizer-logs
# make mutations    takes away each condition that keeps a stale or wrong plan from running: a test must notice; ONLY=words
# make compile-table  what each Triton compiles for each card, without a GPU, into docs/generated/triton.md (Python 3.10 or 3.11)
# make cuda-table   registers, spills and occupancy of the kernels in CUDA C++ for each card and NVRTC, into docs/generated/cuda.md
# make lint         ruff and mypy alone
# make bench        UNets at several sizes, four ways to run each (needs a GPU), into benchmarks/results/unet-<gpu>.json
# make clean        removes the environments and everything generated
#
# CPU=1 takes torch for CPUs, which saves some gigabytes on a machine without a GPU (of Linux; others' is for CPUs anyhow),
# PYTHON=python3.11 chooses the interpreter (test-stack: that of the hosts with that torch is the default),
# PIP_ARGS='--extra-index-url …' goes to pip, WORKERS=8 uses more cores, STACKS=folder keeps test-stack's environments,
# PAGES=folder those with a Gradio (default .pages),
# TRITON_WHEELS=folder has the versions of make compile-table unpacked already, or keeps them (default .triton),
# TABLE='--dtype float16 --case sd15:512x512' compiles a part of it,
# CASES='sd15:512x512:1 sdxl:1024x1024:4' names what make bench measures (default: all that is not measured yet).

PYTHON ?= python3
PIP_ARGS ?=
CPU ?=
WORKERS ?= 2
EVENTS ?= 20000
SEED ?= 0
ONLY ?=
CASES ?=
TABLE ?=
TRITON_WHEELS ?= .triton
NVRTC_WHEELS ?= .nvrtc
STEP ?= 0.004
TORCH ?= 2.13.0
STACKS ?= .stacks
PAGES ?= .pages
CHROMIUM ?= $(firstword $(wildcard $(addprefix /usr/bin/,chromium chromium-browser google-chrome)))
AXE ?=
DIFFUSERS ?=
export DEMO_MODEL
# otherwise each worker, and each process that tests start, compiles every source anew
unexport PYTHONDONTWRITEBYTECODE

# the Pythons for which each stack's packages exist; the first is that of the hosts that have this torch
PYTHONS_2.1.2 := 3.10 3.11
PYTHONS_2.3.1 := 3.10 3.11
PYTHONS_2.5.1 := 3.11 3.10
PYTHONS_2.7.1 := 3.10 3.11
PYTHONS_2.13.0 := 3.12 3.13 3.11 3.10
# Triton has an interpreter from 3.0 on, torch 2.4's
NO_INTERPRETER := 2.1.2 2.3.1

# ldm as AUTOMATIC1111 runs it; its own pins are years old and not needed for what is tested
LDM := stable-diffusion-sdkit==2.1.5
ifeq ($(CPU),1)
DOWNLOADS := about 0.5 GB of packages into .venv, 2 GB on disk
CPU_INDEX := https://download.pytorch.org/whl/cpu
else
DOWNLOADS := about 2.8 GB of packages into .venv, 7 GB on disk (torch with CUDA; CPU=1 takes torch for CPUs: 0.5 and 2 GB)
CPU_INDEX :=
endif
# what is imported is compiled then; to compile all of it takes half a minute
PIP := -m pip install --disable-pip-version-check --no-compile $(PIP_ARGS)

RESULTS := .pytest_cache/results
PYTEST := .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal
SUITE = $(PYTEST) --junitxml=$(RESULTS)/suite.xml tests
INTERPRETER = TRITON_INTERPRET=1 $(PYTEST) --junitxml=$(RESULTS)/interpreter.xml -m interpreter tests/kernels
TOTALS = .venv/bin/python tests/totals.py $(RESULTS)/suite.xml $(RESULTS)/interpreter.xml

# each Gradio that a WebUI has, and as SFAST_GRADIO_PYTHON names them
GRADIOS := 3.41.2 3.43.2
WITH_PAGES = SFAST_GRADIO_PYTHON=$(subst $() ,:,$(foreach each,$(GRADIOS),$(abspath $(PAGES))/$(each)/bin/python))

.PHONY: demo quick test test-long test-pages test-coarse-clock test-stack test-floor test-diffusers soak sanitizer mutations compile-table cuda-table lint bench doctor clean

# by make --jobs=2 demo test, they run at the same time: nothing is installed into .venv meanwhile
demo: .venv/.demo $(if $(filter test,$(MAKECMDGOALS)),.venv/.dev)
	.venv/bin/python -m sfast_ext demo

quick: lint
	SFAST_TEST_SECONDS=25 .venv/bin/python -m pytest -n $(WORKERS) --dist worksteal $$(.venv/bin/python tests/quick.py)

test: lint $(GRADIOS:%=$(PAGES)/%/.installed)
	$(WITH_PAGES) $(SUITE)
	$(INTERPRETER)
	@$(TOTALS)

test-long: export SFAST_ALL_CASES := 1
test-long: test

test-pages: $(GRADIOS:%=$(PAGES)/%/.installed) $(PAGES)/browser/.installed
	$(if $(CHROMIUM),,$(error There is no Chromium in /usr/bin: name one, CHROMIUM=path))
	$(WITH_PAGES) SFAST_CHROMIUM=$(CHROMIUM) SFAST_AXE=$(AXE) $(PAGES)/browser/bin/python -m pytest \
		tests/pages tests/hosts/live/test_browser.py tests/hosts/live/test_browser_keyboard.py -k "small"

test-coarse-clock: export SFAST_TEST_CLOCK_STEP := $(STEP)
test-coarse-clock: .venv/.dev
	$(SUITE)
	$(INTERPRETER)
	@$(TOTALS)

ifneq ($(filter test-stack,$(MAKECMDGOALS)),)
ifeq ($(wildcard requirements-stack/$(TORCH).txt),)
$(error There is no stack with torch $(TORCH): TORCH is one of $(patsubst requirements-stack/%.txt,%,$(wildcard requirements-stack/*.txt)))
endif
ifeq ($(origin PYTHON),file)
PYTHON := python$(firstword $(PYTHONS_$(TORCH)))
endif
VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
ifeq ($(filter $(VERSION),$(PYTHONS_$(TORCH))),)
$(error $(PYTHON) is $(if $(VERSION),Python $(VERSION),not to be found), and the stack with torch $(TORCH) needs Python $(PYTHONS_$(TORCH)): name one, PYTHON=python$(firstword $(PYTHONS_$(TORCH))))
endif
STACK := $(STACKS)/torch-$(TORCH)-python$(VERSION)

test-stack: $(STACK)/.installed
	$(STACK)/bin/python -m pytest -n $(WORKERS) --dist worksteal tests
ifeq ($(filter $(TORCH),$(NO_INTERPRETER)),)
	TRITON_INTERPRET=1 $(STACK)/bin/python -m pytest -n $(WORKERS) --dist worksteal -m interpreter tests/kernels
endif

$(STACK)/.installed: requirements-stack/$(TORCH).txt requirements-test.txt $(if $(filter 2.13.0,$(TORCH)),requirements-dev.txt requirements-demo.txt)
	$(PYTHON) -m venv $(STACK)
	$(STACK)/bin/python $(PIP) -r $<
	$(STACK)/bin/python $(PIP) --no-deps $(LDM)
	touch $@
endif

test-floor:
	$(MAKE) test-stack TORCH=2.1.2

# what diffusers' tests import in addition to what is in .venv
test-diffusers: .venv/.dev
	$(if $(DIFFUSERS),,$(error Name a checkout of huggingface/diffusers: make test-diffusers DIFFUSERS=path))
	.venv/bin/python $(PIP) parameterized==0.9.0 requests-mock==1.12.1
	PYTHONPATH=.:tests .venv/bin/python -W ignore -m diffusers_suite $(DIFFUSERS) --workers $(WORKERS)

soak: .venv/.dev
	PYTHONPATH=.:tests .venv/bin/python -W ignore -m fuzz --events $(EVENTS) --seed $(SEED)

sanitizer: .venv/.dev
	PYTHONPATH=.:tests .venv/bin/python -W ignore -m sanitizer

mutations: .venv/.dev
	PYTHONPATH=.:tests .venv/bin/python -W ignore -m mutations --only "$(ONLY)"

compile-table: .venv/.demo
	TRITON_WHEELS=$(TRITON_WHEELS) .venv/bin/python -m benchmarks.compile_table $(TABLE)

cuda-table: .venv/.demo
	NVRTC_WHEELS=$(NVRTC_WHEELS) .venv/bin/python -m benchmarks.compile_table.cuda

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: .venv/.demo
	.venv/bin/python -m benchmarks.unet $(foreach case,$(CASES),--case $(case))
	.venv/bin/python -m benchmarks.unet.table --print

doctor: .venv/.demo
	.venv/bin/python -m sfast_ext doctor

# a stamp for each set of packages: nothing is installed twice, and all anew when its list changes
.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv

.venv/.demo: requirements-demo.txt | .venv/bin/python
	@echo "Downloads $(DOWNLOADS)."
	$(if $(CPU_INDEX),.venv/bin/python $(PIP) --extra-index-url $(CPU_INDEX) $$(grep '^torch==' requirements-demo.txt))
	.venv/bin/python $(PIP) -r requirements-demo.txt
	touch $@

# what .venv has is found there as well, so that torch is not installed again
$(PAGES)/%/.installed: requirements-pages/%.txt requirements-pages/common.txt .venv/.dev
	.venv/bin/python -m venv --without-pip $(PAGES)/$*
	.venv/bin/python $(PIP) --ignore-installed --no-deps --prefix $(PAGES)/$* -r $<
	packages='import sysconfig; print(sysconfig.get_path("purelib"))'; \
		.venv/bin/python -c "$$packages" > "$$($(PAGES)/$*/bin/python -c "$$packages")/venv.pth"
	touch $@

.venv/.dev: requirements-dev.txt requirements-test.txt .venv/.demo
	@echo "Downloads what the tests need into .venv, 0.6 GB on disk."
	.venv/bin/python $(PIP) -r requirements-dev.txt
	.venv/bin/python $(PIP) --no-deps $(LDM)
	touch $@

clean:
	rm -rf .venv .triton .nvrtc $(STACKS) $(PAGES) demo-output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
