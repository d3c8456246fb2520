# make quickstart | test | lint | faults | setup
#   PYTHON=python3.12      another interpreter, in an environment of its own
#   PIP=-cconstraints.txt  the versions behind the published tables instead of the newest
PYTHON ?= python3
PIP ?=
VENV ?= .venv$(patsubst %,-%,$(filter-out python3,$(notdir $(PYTHON))))
RUNS ?= runs/quickstart

BIN := $(VENV)/bin
STAMP := $(VENV)/installed

.PHONY: setup quickstart test lint faults clean
.DELETE_ON_ERROR:

setup: $(STAMP)

$(STAMP): requirements.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(0 if v >= (3, 11) else "Python 3.11 or newer is needed, $(PYTHON) is %d.%d: make PYTHON=python3.12 …" % v)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r requirements.txt $(PIP)
	@touch $@

# Softmax and linear attention on associative recall: trained at 64 tokens, tested up to 1024.
quickstart: setup
	$(BIN)/python -m lra.sweep configs/sweeps/quickstart.py --workdir=$(RUNS) --run.platform=cpu

test: setup
	$(BIN)/python -m pytest -n auto

# Kills and damages runs at random; half an hour or more.
faults: setup
	$(BIN)/python tests/faults/run.py

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright --pythonpath $(BIN)/python

clean:
	rm -rf .venv .venv-* .pytest_cache .ruff_cache
