# make test: lint, types and tests.  make train: the main job.  Both need only python3 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip is asked again only when what it should install has changed.
READY := $(VENV)/ready
OLDEST := .venv-oldest

.PHONY: test lint types pytest oldest train stress clean

test: lint types pytest

lint: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(READY)
	$(BIN)/mypy

pytest: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

oldest: $(OLDEST)/ready  # the tests by the oldest torch that is supported
	$(OLDEST)/bin/python -m pytest -n 2 --dist worksteal

train: $(READY)
	$(BIN)/redivider train quickstart

stress: $(READY)  # twenty runs over processes, in each of which a rank is killed
	REDIVIDER_STRESS=20 $(BIN)/python -m pytest tests/distributed/test_train.py -k killed

$(READY): pyproject.toml constraints.txt
	@echo "Installing into $(VENV), a minute or two, once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

$(OLDEST)/ready: pyproject.toml constraints.txt
	@echo "Installing torch 2.11 into $(OLDEST), 5 GB, once."
	$(PYTHON) -m venv $(OLDEST)
	sed 's/^torch==.*/torch==2.11.0/' constraints.txt > $(OLDEST)/constraints.txt
	$(OLDEST)/bin/python -m pip install --quiet --disable-pip-version-check -c $(OLDEST)/constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) $(OLDEST) .mypy_cache .pytest_cache .ruff_cache
