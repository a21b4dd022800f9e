# make demo         pictures with and without the accelerator, compared; DEMO_MODEL=path takes your own model
# make test         ruff, mypy and the whole CPU suite
# make test-floor   the CPU suite on the oldest stack served: torch 2.1.2, diffusers 0.25.1 (Python 3.10 or 3.11)
# make soak         EVENTS=20000 random events, SEED=0 the first seed; a failure names the command that plays it again
# make lint         ruff and mypy alone
# make bench        UNets at several sizes, four ways to run each (needs a GPU), into benchmarks/unet-<gpu>.json
# make clean        removes the environments and everything generated
#
# PYTHON=python3.11 chooses the interpreter, PIP_ARGS='--extra-index-url …' goes to pip, WORKERS=8 uses more cores,
# CASES='sd15:512x512:1 sdxl:1024x1024:4' names what make bench measures (default: all that is not measured yet).

PYTHON ?= python3
PIP_ARGS ?=
WORKERS ?= 2
EVENTS ?= 20000
SEED ?= 0
CASES ?=
export DEMO_MODEL

# ldm as AUTOMATIC1111 runs it; its own pins are years old and not needed for what is tested
LDM := stable-diffusion-sdkit==2.1.5
PIP := -m pip install --disable-pip-version-check $(PIP_ARGS)

.PHONY: demo test test-floor soak lint bench doctor clean

demo: .venv/.demo
	.venv/bin/python -m sfast_ext demo

test: lint
	.venv/bin/python -m pytest -n $(WORKERS) tests
	TRITON_INTERPRET=1 .venv/bin/python -m pytest -n $(WORKERS) tests/kernels

test-floor: .venv-floor/.floor
	.venv-floor/bin/python -m pytest -n $(WORKERS) tests

soak: .venv/.dev
	PYTHONPATH=.:tests .venv/bin/python -W ignore -m stateful --events $(EVENTS) --seed $(SEED)

lint: .venv/.dev
	.venv/bin/ruff check .
	.venv/bin/mypy

bench: .venv/.demo
	.venv/bin/python -m benchmarks.unet $(foreach case,$(CASES),--case $(case))
	.venv/bin/python -m benchmarks.table --print

doctor: .venv/.demo
	.venv/bin/python -m sfast_ext doctor

# a stamp for each set of packages: nothing is installed twice, and all anew when its list changes
.venv/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("Python 3.10 or later is needed" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv .venv

.venv/.demo: requirements-demo.txt | .venv/bin/python
	.venv/bin/python $(PIP) -r requirements-demo.txt
	touch $@

.venv/.dev: requirements-dev.txt .venv/.demo
	.venv/bin/python $(PIP) -r requirements-dev.txt
	.venv/bin/python $(PIP) --no-deps $(LDM)
	touch $@

.venv-floor/.floor: requirements-floor.txt
	$(PYTHON) -c 'import sys; sys.exit(0 if (3, 10) <= sys.version_info < (3, 12) else "torch 2.1.2 needs Python 3.10 or 3.11: make test-floor PYTHON=python3.11")'
	$(PYTHON) -m venv .venv-floor
	.venv-floor/bin/python $(PIP) -r requirements-floor.txt
	.venv-floor/bin/python $(PIP) --no-deps $(LDM)
	touch $@

clean:
	rm -rf .venv .venv-floor demo-output build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
