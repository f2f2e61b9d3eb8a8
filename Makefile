# `make demo` and `make test` work on a fresh machine with Python 3.11 or newer; `make help` says the rest.

PYTHON ?= $(firstword $(shell command -v python3.11 python3.12 python3))
VENV ?= .venv
BIN := $(VENV)/bin
# Touched when an install has succeeded: a warm run does not call pip. The demo needs the product alone.
STAMP := $(VENV)/.installed
DEMO_STAMP := $(VENV)/.installed-demo
# One compute thread per process: a local cluster gives each process a core of its own.
export OMP_NUM_THREADS ?= 1
# Tests that start clusters wait for much and stay on one worker (tests/conftest.py): with two cores there is room for two
# more.
TEST_WORKERS ?= 3
# Further options of pytest.
TEST_OPTIONS ?=

.PHONY: help venv demo test test-long check lint types buf stubs manifests-current protos manifests client bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 20

venv: $(STAMP) ## a virtual environment with everything installed
$(STAMP): pyproject.toml constraints.txt
	@echo "installing Baton and what its tests need into $(VENV) (a minute or two the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[test,ucx]'
	touch $@ $(DEMO_STAMP)

$(DEMO_STAMP): pyproject.toml constraints.txt
	@echo "installing Baton into $(VENV) (a minute or two the first time)"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -c constraints.txt -e '.[ucx]'
	touch $@

demo: $(DEMO_STAMP) ## start a whole local cluster, ask the shipped model a question, show the timings
	$(BIN)/baton demo

# By the first test to call a kernel it would be compiled under a deadline, and by each CPU core but one waited for.
KERNELS := build/.kernels
$(KERNELS): $(STAMP) $(shell find engine/kernels/host -name '*.py')
	@echo "compiling the kernels of this CPU (half a minute to two minutes the first time)"
	@$(BIN)/python -m engine.kernels.host.aot.compile_all
	@mkdir -p $(@D) && touch $@

test: $(KERNELS) ## all tests that need no GPU, but for the long ones; 20 to 35 minutes on two cores
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) -m "not long" $(TEST_OPTIONS)

# That no test is long is no failure: pytest's exit code 5.
test-long: $(KERNELS) ## the long ones
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) -m long $(TEST_OPTIONS) || test $$? -eq 5

check: lint types buf stubs manifests-current ## everything that can be said without running
	@echo "check passed: lint, types, protos, stubs, manifests"

lint: venv
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: venv
	$(BIN)/mypy

buf: venv
	$(BIN)/buf lint

# The committed stubs must be what the committed .proto files give.
stubs: venv
	@rm -rf build/stubs && mkdir -p build/stubs
	@$(BIN)/python -m tools.stubs build/stubs
	@cd build/stubs && for f in protos/*; do diff -u $(CURDIR)/$$f $$f || { echo "$$f is stale: run make protos"; exit 1; }; done

# The rendered manifests must be what the overlays give; the tests then need no kubectl.
manifests-current:
	@if command -v kubectl >/dev/null; then \
		deploy/render.sh "$(CURDIR)/build/deploy" && diff -ru deploy/rendered build/deploy \
			|| { echo "deploy/rendered is stale: run make manifests"; exit 1; }; \
	else echo "no kubectl here: deploy/rendered is not compared with the overlays"; fi

manifests: ## render the overlays into deploy/rendered (needs kubectl)
	deploy/render.sh

protos: venv ## regenerate the stubs from the .proto files
	$(BIN)/python -m tools.stubs .

client: venv ## the distribution baton-client, into build/baton-client/dist
	$(BIN)/python -m tools.client_package build/baton-client >/dev/null
	$(BIN)/python -m pip wheel --quiet --no-deps -w build/baton-client/dist build/baton-client

bench: venv ## benchmarks, one JSON line each
	$(BIN)/python -m bench.handoff --json
	$(BIN)/python -m bench.engine --json
	$(BIN)/python -m bench.kernels --json
	$(BIN)/python -m bench.e2e --json
	$(BIN)/python -m bench.stages --json
	$(BIN)/python -m bench.parallel --json
	$(BIN)/python -m bench.speculation --json
	$(BIN)/python -m bench.gateway --json
	$(BIN)/python -m bench.router --json

clean: ## remove the virtual environment and everything generated outside version control
	rm -rf $(VENV) build *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
