# make fast: an answer in a minute.  make test: everything.  make train: the main job.
# They need only python3 and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# pip is asked again only when what it should install has changed. What training needs is a part of
# what development needs.
TRAIN := $(VENV)/train.ready
DEV := $(VENV)/dev.ready
# Without bytecode: python writes it for the few modules that it imports.
INSTALL := python -m pip install --disable-pip-version-check --no-compile -c constraints.txt
# Two more than there are cores: some tests wait for processes.
WORKERS ?= $(shell $(PYTHON) -c "import os; print(os.cpu_count() + 2)")
PYTEST := python -m pytest -n $(WORKERS) --dist worksteal
# Bytecode that is kept saves seconds in every process that a test starts.
unexport PYTHONDONTWRITEBYTECODE
TORCH ?= 2.11.0
OTHER := .venv-torch-$(TORCH)
INTEROP := .venv-interop

.PHONY: fast test install lint types test-types unit pytest other interop docs train picture stress clean

fast: lint types unit

# Beside each other: mypy uses one core.
test: lint
	$(MAKE) -j2 test-types pytest

install: $(DEV)

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo  # the layers of .importlinter

types: $(DEV)
	$(BIN)/mypy

test-types: types  # a benchmark is a folder of scripts, which import each other by their names
	$(BIN)/mypy --config-file tests/mypy.ini tests
	for folder in benchmarks/*/; do \
		MYPYPATH=$$folder:benchmarks/pipeline-scaling:experiments:src $(BIN)/mypy --explicit-package-bases $$folder || exit 1; \
	done

unit: $(DEV)
	$(BIN)/$(PYTEST) -q -m "not slow" --ignore=tests/gpu

pytest: $(DEV)
	$(BIN)/$(PYTEST)

other: $(OTHER)/ready  # the tests with another torch; 2.11.0 is the oldest that is supported
	$(OTHER)/bin/$(PYTEST)

interop: $(INTEROP)/ready  # with the tools that people train pretrained models by
	$(INTEROP)/bin/$(PYTEST) tests/interop tests/integration/test_make_reversible.py tests/docs

docs: $(DEV)  # the site, in site/; serve it with: .venv/bin/mkdocs serve
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

train: $(TRAIN)
	$(BIN)/redivider train quickstart

# The picture of a report in the documents: of a quickstart, by any Chromium.
RUN ?= runs/quickstart
BROWSER ?= chromium
picture: $(RUN)/report.html
	$(BROWSER) --headless --hide-scrollbars --window-size=1400,1250 \
		--screenshot=docs/report.png file://$(abspath $<)

$(RUN)/report.html: | $(TRAIN)
	$(BIN)/redivider train quickstart --out $(RUN)

stress: $(DEV)  # a hundred runs over processes, in each of which a rank is killed
	REDIVIDER_STRESS=100 $(BIN)/python -m pytest tests/integration/test_torchrun.py -k killed

$(TRAIN): pyproject.toml constraints.txt
	@echo "Installing torch and what training needs into $(VENV), once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) -e ".[train]"
	@touch $@

$(DEV): pyproject.toml constraints.txt
	@echo "Installing torch and what the tests need into $(VENV), once."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/$(INSTALL) -e ".[dev]"
	@touch $(TRAIN) $@

$(OTHER)/ready: pyproject.toml constraints.txt
	@echo "Installing into $(OTHER), 5 GB, once."
	$(PYTHON) -m venv $(OTHER)
	sed 's/^torch==.*/torch==$(TORCH)/' constraints.txt > $(OTHER)/constraints.txt
	$(OTHER)/bin/python -m pip install --disable-pip-version-check -c $(OTHER)/constraints.txt -e ".[dev]"
	touch $@

$(INTEROP)/ready: pyproject.toml constraints.txt
	@echo "Installing into $(INTEROP), once."
	$(PYTHON) -m venv $(INTEROP)
	$(INTEROP)/bin/$(INSTALL) -e ".[dev,interop]"
	@touch $@

clean:
	rm -rf site $(VENV) $(INTEROP) .venv-torch-* .mypy_cache .pytest_cache .ruff_cache
