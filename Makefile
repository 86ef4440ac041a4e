# Each target sets up what it needs, on a machine with Python >= 3.10, make and the package index.
PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin
REFERENCE := .venv-reference
PROMPT := class Node:\n    def __init__(self, name, parent=None):\n        self.name = name\n

.PHONY: demo test test-reference lint bench clean

demo: $(VENV)/.installed  ## stream text from the bundled pair and prove it equal to plain decoding
	@printf '%b' '$(PROMPT)' | $(RUN)/dflash-mlx generate --model demo --prompt - --max-tokens 128 --block-size 8 --check

test: $(VENV)/.installed-test  ## run the tests
	$(RUN)/python -m pytest -q -n auto --maxprocesses=4 --dist worksteal

test-reference: $(REFERENCE)/.installed  ## run the tests against PyTorch's draft and its tools (Python >= 3.11)
	$(REFERENCE)/bin/python -m pytest -q -m reference -n auto --maxprocesses=4 --dist worksteal

lint: $(VENV)/.installed-test  ## check style, types and which room imports which
	$(RUN)/ruff check .
	$(RUN)/ruff format --check .
	$(RUN)/mypy
	$(RUN)/lint-imports --no-logo

bench: $(VENV)/.installed  ## measure the bundled pair on this machine
	$(RUN)/dflash-mlx benchmark --model demo --samples 4

clean:
	rm -rf $(VENV) $(REFERENCE) build dist *.egg-info

$(VENV)/bin/python $(REFERENCE)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, try make PYTHON=python3.12")'
	$(PYTHON) -m venv $(@:/bin/python=)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

$(VENV)/.installed-test: $(VENV)/bin/python pyproject.toml
	$(RUN)/python -m pip install --quiet --disable-pip-version-check -e '.[test]'
	@touch $@ $(VENV)/.installed

# Kept apart: nothing else needs PyTorch. The import names what is missing, where a test would only be skipped.
$(REFERENCE)/.installed: $(REFERENCE)/bin/python pyproject.toml
	$(REFERENCE)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[reference]'
	$(REFERENCE)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps dflash==0.1.0 speculators==0.9.0
	$(REFERENCE)/bin/python -c 'import dflash.model, speculators.convert.dflash, torch, transformers'
	@touch $@
