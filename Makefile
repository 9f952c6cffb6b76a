# `make demo` and `make test` work on a fresh machine with Python 3.11 or later, and again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-fast lint bench aot clean

demo: $(VENV)/.installed
	$(BIN)/kvsim compare experiments/quickstart.yaml -o results/quickstart --overwrite

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2

test-fast: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 -m "not slow"

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# compiled as pip compiles what it installs, also where Python is told to write no bytecode
bench: $(VENV)/.installed
	$(BIN)/python -m compileall -q kvsim
	$(BIN)/python benchmarks/simulator.py

# Every kernel for every GPU target, without a GPU: what each needs, in results/aot.csv, and the
# most of each, printed. Takes some ten minutes.
aot: $(VENV)/.installed-gpu
	mkdir -p results
	env -u TRITON_INTERPRET $(BIN)/python -m gpu_backend.aot results/aot.csv

$(VENV)/.installed: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	touch $@

$(VENV)/.installed-dev: pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev,gpu]"
	touch $@ $(VENV)/.installed $(VENV)/.installed-gpu

$(VENV)/.installed-gpu: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[gpu]"
	touch $@

clean:
	rm -rf $(VENV) results build *.egg-info
