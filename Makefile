# Everything sets up .venv by itself; a second call finds it done. PYTHON picks the interpreter (3.11 or newer).
PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
ARGS   ?=

.PHONY: train test lint types layers check clean

train: $(VENV)/.done
	$(BIN)/python -m mprun precision=fp16_dynamic model=vit $(ARGS)

test: $(VENV)/.done
	$(BIN)/python -m pytest -n auto --dist worksteal $(ARGS)

lint: $(VENV)/.done
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/.done
	$(BIN)/mypy

layers: $(VENV)/.done
	$(BIN)/lint-imports

check: lint types layers test

$(VENV)/.done: pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "mprun needs Python 3.11 or newer; set PYTHON=python3.12")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
