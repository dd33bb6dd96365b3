# Everything runs in .venv, which is made at the first command and renewed when the requirements change.
PYTHON ?= python3
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help install course slides reproduce update docs benchmark gpu test test-whole test-slow test-oldest test-wheel test-gpu models mutants lint types clean

help:  ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo 'ARGS="..." passes options on: make test ARGS="-k clipping". PYTHON=python3.12 chooses the interpreter of .venv.'

install: .venv/.installed  ## create .venv with the versions of constraints.txt (PyTorch with CUDA: several GB)

course: .venv/.installed  ## open the course in JupyterLab; ARGS=students: pack it into build/, without solutions
ifeq ($(ARGS),students)
	$(BIN)/python tools/course/students.py
else
	$(BIN)/jupyter lab --ServerApp.root_dir='$(CURDIR)' notebooks/00_primer.ipynb $(ARGS)
endif

slides: .venv/.installed  ## make build/slides.html: ten slides of the course, one file, without network
	$(BIN)/python -m hyfreedp.experiments slides

reproduce: .venv/.installed  ## run the laptop profile's notebooks, write build/laptop/ with report.html
	$(BIN)/python -m hyfreedp.experiments reproduce --profile laptop --jobs 2 $(ARGS)

update: .venv/.installed  ## renew the committed figures and .ipynb from committed sources
	$(BIN)/python -m hyfreedp.experiments update $(ARGS)

docs: .venv/.installed  ## build the site into build/docs, without network; open build/docs/index.html
	$(BIN)/python -m sphinx -W --keep-going -q -c docs -b html . build/docs $(ARGS)

benchmark: .venv/.installed  ## measure time and memory of a step beside plain ones and others' (an hour)
	$(BIN)/python -m hyfreedp.experiments.benchmark $(ARGS)

gpu: .venv/.installed  ## fill data/results/gpu, resumable (docs/gpu.md); ARGS=claim: one claim of the paper in an evening
ifeq ($(ARGS),claim)
	$(BIN)/python -m hyfreedp.experiments grid --profile claim
else
	$(BIN)/python -m hyfreedp.experiments.benchmark --device accelerator --resume
	$(BIN)/python tools/weights/pretrain.py tiny_imagenet
	$(BIN)/python -m hyfreedp.experiments grid --profile gpu
endif

test: .venv/.installed  ## run the test suite (ruff included), without the slow tests
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

test-whole: .venv/.installed  ## run the tests of whole notebooks, pages and commands (five minutes)
	$(BIN)/python -m pytest -n auto --dist worksteal -m whole $(ARGS)

test-slow: .venv/.installed  ## run the slow tests: statistics and accuracy targets
	$(BIN)/python -m pytest -m slow --timeout 3600 $(ARGS)

test-oldest: .venv-oldest/.installed  ## run the core's tests with the oldest versions that pyproject.toml allows
	.venv-oldest/bin/python -m pytest -n auto --dist worksteal tests/core $(ARGS)

test-wheel: .venv/.installed  ## try the wheel with each Python, oldest and newest PyTorch (half an hour; before a release)
	$(BIN)/python tools/release $(ARGS)

test-gpu: .venv/.installed  ## run the tests on an accelerator, skipped where there is none, and all notebooks (8 minutes)
	$(BIN)/python -m pytest -m gpu tests/gpu tests/experiments/test_notebooks.py $(ARGS)

models: .venv/.installed  ## try private steps on models of timm, transformers and peft, write docs/models.md (ten minutes)
	$(BIN)/python tools/models $(ARGS)

mutants: .venv/.installed  ## make deliberate faults in a copy, see which test notices each (ten minutes)
	$(BIN)/python tools/mutation/mutants.py $(ARGS)

lint: .venv/.installed  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/.installed  ## check type annotations
	$(BIN)/mypy

clean:  ## remove caches and build products (neither .venv nor results)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find hyfreedp tests notebooks -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true

.venv/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo 'hyfreedp needs Python 3.11 or newer, and "$(PYTHON)" is not: name one that is, as in  make PYTHON=python3.12 ...' >&2; \
	  exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

.venv-oldest/.installed: pyproject.toml
	$(PYTHON) -m venv --clear .venv-oldest
	grep -oE '"[a-z-]+>=[0-9.]+"' pyproject.toml | sed -E 's/"(.*)>=(.*)"/\1==\2.*/' | sort -u > .venv-oldest/oldest.txt
	.venv-oldest/bin/python -m pip install --disable-pip-version-check -c .venv-oldest/oldest.txt -e '.[dev]'
	@touch $@
