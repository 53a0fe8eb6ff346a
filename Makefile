# Two commands do everything on a fresh machine: `make demo` and `make test`.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PACKAGES := caee_cli probes store reports runtime
SOURCES := $(shell find $(PACKAGES) -type f -not -name '*.pyc' -not -path '*/__pycache__/*' 2>/dev/null)
DEMO_STORE ?= build/demo.db
DEMO_REPORT ?= build/demo-report.html

.PHONY: demo test lint types contracts unit bench dev browser reference clean

# Dependencies, pinned to what was tested; remade when they change.
$(BIN)/.dependencies: pyproject.toml constraints.txt tools/requirements.py
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/python tools/requirements.py pyproject.toml > $(VENV)/requirements.txt
	$(BIN)/pip install --quiet -c constraints.txt -r $(VENV)/requirements.txt
	touch $@

# What the tests need beside them; Triton for the GPU kernels, which are interpreted and compiled ahead without a GPU;
# lm-evaluation-harness for `caee run --lm-eval`.
$(BIN)/.tools: $(BIN)/.dependencies
	$(BIN)/python tools/requirements.py pyproject.toml --extra test --extra dev --extra triton --extra lm-eval > $(VENV)/tools.txt
	$(BIN)/pip install --quiet -c constraints.txt -r $(VENV)/tools.txt
	touch $@

# The built wheel, installed as a user would: everything below runs against it, not against the source folder.
$(BIN)/.wheel: $(BIN)/.dependencies $(SOURCES) README.md
	rm -rf dist
	$(BIN)/python -m build --quiet --wheel --no-isolation
	$(BIN)/pip install --quiet --no-deps --force-reinstall dist/caee-*.whl
	touch $@

demo: $(BIN)/.wheel
	@mkdir -p build
	CAEE_STORE=$(DEMO_STORE) $(BIN)/caee probe
	CAEE_STORE=$(DEMO_STORE) $(BIN)/caee calibrate
	CAEE_STORE=$(DEMO_STORE) $(BIN)/caee run
	CAEE_STORE=$(DEMO_STORE) $(BIN)/caee report -o $(DEMO_REPORT) --force

test: lint types contracts unit

lint: $(BIN)/.tools
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(BIN)/.tools
	$(BIN)/mypy

contracts: $(BIN)/.tools
	$(BIN)/lint-imports

unit: $(BIN)/.wheel $(BIN)/.tools browser
	CAEE_TEST_WHEEL=1 $(BIN)/pytest -n 2 --dist loadgroup

# Chromium for the report's tests; they are skipped, with the reason, where it cannot be had.
browser:
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null || command -v google-chrome >/dev/null \
	  || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update >/dev/null && apt-get -qq install -y chromium >/dev/null; } \
	  || echo "no Chromium here: the report's browser tests will be skipped"

# What `make bench` compares with.
$(BIN)/.peers: $(BIN)/.dependencies
	$(BIN)/python tools/requirements.py pyproject.toml --extra bench > $(VENV)/peers.txt
	$(BIN)/pip install --quiet -c constraints.txt -r $(VENV)/peers.txt
	touch $@

bench: $(BIN)/.wheel $(BIN)/.tools $(BIN)/.peers
	$(BIN)/python benchmarks/run.py

# For working on the project: an editable installation beside the wheel's.
dev:
	$(PYTHON) -m venv .venv-dev
	.venv-dev/bin/pip install --quiet --upgrade pip
	.venv-dev/bin/pip install --quiet -c constraints.txt -e '.[test,dev]'

# The generated command reference; a test fails where it is out of date.
reference: $(BIN)/.wheel
	$(BIN)/python tools/command_reference.py

clean:
	rm -rf $(VENV) .venv-dev dist build
