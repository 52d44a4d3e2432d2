# make demo   serve the example and send it images
# make test   lint, types, tests
# Both make their own virtual environment in .venv and can be run again at any time.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The live tests' core also runs on these; each lies in a directory of its own, so torch is installed once.
GUNICORNS := 22.0.0 23.0.0 25.1.0
EXAMPLE := docs/examples/digits

.PHONY: demo test lint clean

demo: $(VENV)/examples
	test -f $(EXAMPLE)/digits.safetensors || $(BIN)/python $(EXAMPLE)/train.py
	$(BIN)/python $(EXAMPLE)/demo.py

test: lint $(GUNICORNS:%=$(VENV)/gunicorns/%)
	$(BIN)/python -m pytest -n 4 --dist loadgroup

lint: $(VENV)/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# One file for each set of dependencies installed.
$(VENV)/examples $(VENV)/test: $(VENV)/%: setup.cfg | $(BIN)/python
	$(BIN)/python -m pip install --quiet --editable '.[$*]'
	touch $@

# Debian's python3 has no ensurepip unless python3-venv is installed; its pip can install another into the environment.
$(BIN)/python:
	$(PYTHON) -m venv $(VENV) || \
	{ $(PYTHON) -m venv --clear --without-pip $(VENV) && $(PYTHON) -m pip --python $@ install --quiet pip; }

$(VENV)/gunicorns/%: | $(VENV)/test
	$(BIN)/python -m pip install --quiet --no-deps --target $@.part gunicorn==$*
	mv $@.part $@

clean:
	rm -rf $(VENV) build dist *.egg-info
