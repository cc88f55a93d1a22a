# make setup   own .venv with pinned versions      make test    the test suite
# make test-all   slow tests too, and all cases of those that have many (tests/conftest.py)
# make demo    trains digits/wide on two processes; as root also on emulated hosts, with a live switch
# make lint, make types, make house (the form of the package against its limits), make format
# make claims   the README's table of figures and its picture, from benchmarks/claims.json
# make study    the study of docs/study         make screens  the README's pictures of a terminal
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
export OMP_NUM_THREADS ?= 1
# tests start Python dozens of times: without bytecode each compiles torch anew, for 3 to 5 s
unexport PYTHONDONTWRITEBYTECODE

TESTED := -n 3 --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-all lint types house format claims study screens

setup: $(STAMP)

# not compiled beforehand: most of what is installed is never imported
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "Python 3.11 or newer is needed: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile \
		-c constraints.txt -e '.[dev]'
	@touch $@

demo: setup
	$(BIN)/synchromesh train digits/wide --nproc 2
	$(BIN)/python examples/demo.py

# whole files on each of three workers, in their order: traces are made once for all tests of a file,
# those that take long are not the last, and while ranks wait for each other another worker computes
test: setup
	$(BIN)/python -m pytest $(TESTED)

test-all: setup
	$(BIN)/python -m pytest $(TESTED) --all

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: setup
	$(BIN)/mypy

house: setup
	$(BIN)/python -m benchmarks.house

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

claims: setup
	$(BIN)/python -m benchmarks.claims --render

# as root; an hour and a half on two cores, goes on where it stopped
study: setup
	$(BIN)/python -m benchmarks.study

# where nothing else runs: a run on two processes and a plan for eight devices
screens: setup
	$(BIN)/python -m benchmarks.screens
