# make test: lint, types and tests.  make train: the main job.  Both need only python3 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip is asked again only when what it should install has changed.
READY := $(VENV)/ready
TORCH ?= 2.11.0
OTHER := .venv-torch-$(TORCH)

.PHONY: test lint types pytest other train stress clean

test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

pytest: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

other: $(OTHER)/ready  # the tests by another torch; 2.11.0 is the oldest that is supported
	$(OTHER)/bin/python -m pytest -n 2 --dist worksteal

train: $(READY)
	$(BIN)/redivider train quickstart

stress: $(READY)  # twenty runs over processes, in each of which a rank is killed
	REDIVIDER_STRESS=20 $(BIN)/python -m pytest tests/distributed/test_train.py -k killed

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(OTHER)/ready: pyproject.toml constraints.txt
	@echo "Installing into $(OTHER), 5 GB, once."
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OTHER)/constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .venv-torch-* .mypy_cache .pytest_cache .ruff_cache
