# Two commands do all set-up: `make demo` runs the main job, `make test` the tests.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
JOBS ?= 2
export HF_HUB_OFFLINE = 1
export TOKENIZERS_PARALLELISM = false

.PHONY: demo test lint format faults archs engines oracles bench clean

$(VENV)/.installed: pyproject.toml constraints-cpu.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q -c constraints-cpu.txt torch
	$(BIN)/python -m pip install -q -c constraints-cpu.txt -e '.[test]'
	touch $@

demo: $(VENV)/.installed
	$(BIN)/mha2gqa demo

test: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) -m 'not slow'

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The public faults of the field, one test each.
faults: $(VENV)/.installed
	$(BIN)/python -m pytest -n $(JOBS) tests/test_faults*.py

# Every architecture of the table, with its real class (three minutes on two cores).
archs: $(VENV)/.installed
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(JOBS) tests/test_architectures_walk.py

# Equality with independent tools (lm-eval, ModelOpt); installs them.
oracles: $(VENV)/.installed
	$(BIN)/python -m pip install -q -c constraints-cpu.txt -e '.[test,oracles]'
	$(BIN)/python -m pytest -m slow tests/test_oracles.py

clean:
	rm -rf $(VENV) build *.egg-info
