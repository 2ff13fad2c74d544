# What a developer does with this repository, one target each. `make` alone lists them; CONTRIBUTING.md tells the rest.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
LOCK := requirements/constraints.txt
PIP_VERSION := 26.3# pinned like the rest; from 25.1 on pip reads dependency groups
PYTEST := $(BIN)/python -m pytest
# Files of tests are shared out among processes, each with a PostgreSQL of its own. WORKERS=0 is plain pytest.
# Two for each core: half of them take tests that wait for processes that they start, kill and drain (tests/conftest.py).
WORKERS ?= $(shell echo $$(($$(getconf _NPROCESSORS_ONLN) * 2)))
SPREAD := --numprocesses $(WORKERS) --maxprocesses 8 --dist loadfile --no-loadscope-reorder
CHECKS := format-check lint types proto-check migrations-check architecture prose reference-check console-check commits-check

MAKEFLAGS += --no-print-directory
.DEFAULT_GOAL := help
.PHONY: help setup setup-dev docs demo test test-fast test-faults test-clients test-peers test-images check checks $(CHECKS) fmt reference console pictures proto proto-baseline migration lock lock-check dist dist-check release-rehearsal clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-18s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(VENV)/.installed ## install what Weir runs on, pinned, into .venv

setup-dev: $(VENV)/.installed-dev ## the same and the development tools

demo: setup ## start everything, run the reference workload, print the bill, stop
	@$(BIN)/weir demo

# Tests start hundreds of interpreters; each would compile our modules again, and pytest rewrite all tests.
test test-fast test-faults: export PYTHONDONTWRITEBYTECODE :=

# A test that fails beside two others may have met a slow machine: it gets a second, lone run. A line
# "second runs: COUNT TEST..." in the output (tests/conftest.py) counts and names these tests; each is a fault to mend.
AGAIN = { [ $$? -eq 1 ] && echo "== the failed tests again, one at a time" && \
	$(PYTEST) --verbose --last-failed --last-failed-no-failures none --maxfail 1; }

test: setup-dev ## every test
	@$(PYTEST) $(SPREAD) || $(AGAIN)

test-fast: setup-dev ## every test but those that kill processes and cut connections
	@$(PYTEST) $(SPREAD) -m "not faults"

test-faults: setup-dev ## the tests that kill processes and cut connections
	@$(PYTEST) $(SPREAD) -m faults

# Installs from package registries, so `make test` does not include it.
test-clients: setup-dev ## third-party clients: install each, run its code of docs/reference/clients.md; CLIENTS="openai ..."
	@$(BIN)/python -m infra.clients $(CLIENTS)

# Installs gigabytes. PEERS="vllm ..." chooses.
test-peers: setup-dev ## engines of other projects: install each, run the tests that need it
	@$(BIN)/python -m infra.peers $(PEERS)

# Needs root, debootstrap and buildah. WEIR_TEST_IMAGES=DIRECTORY takes an image that was built before.
test-images: export WEIR_TEST_IMAGES ?= build
test-images: setup-dev ## the image without torch: build it in a file system of Debian, run the services of compose.yaml in it
	@$(PYTEST) --quiet tests/infra/test_image_builds.py

check: $(CHECKS) ## every check that is not a test: those that follow

checks:
	@echo $(CHECKS)

format-check: setup-dev ## is the Python code in its one format
	@$(BIN)/ruff format --check --quiet . || { echo "run: make fmt" >&2; exit 1; }

lint: setup-dev ## ruff's rules
	@$(BIN)/ruff check --quiet .

types: setup-dev ## mypy --strict
	@$(BIN)/mypy

proto-check: setup-dev ## the contract: buf's lint and format, no breaking change, generated code up to date
	@$(BIN)/python -m infra.check_proto
	@$(BIN)/python -m infra.generate_proto --check
	@$(BIN)/python -m infra.generate_sdk --check

migrations-check: setup-dev ## up, down and up again on a real PostgreSQL; models equal migrations
	@$(BIN)/python -m infra.check_migrations

architecture: setup-dev ## who may import whom, and the other rules of tests/test_architecture.py
	@$(PYTEST) --quiet tests/test_architecture.py

console-check: setup-dev ## the page of the console: format, types, and the bytes that its source builds
	@$(BIN)/python -m infra.console_page --check

commits-check: setup-dev ## the messages of the commits since the newest tag or since the branch began
	@$(BIN)/python -m infra.check_commits

prose: setup-dev ## the language of docstrings, comments, messages and pages
	@$(BIN)/python -m infra.prose

reference-check: setup-dev ## the generated parts of docs/ equal the source
	@$(BIN)/python -m infra.reference --check

fmt: setup-dev ## bring Python and proto files into their one format
	@$(BIN)/ruff check --quiet --fix-only .
	@$(BIN)/ruff format --quiet .
	@$(BIN)/python -m infra.check_proto --format

reference: setup-dev ## write the generated parts of docs/
	@$(BIN)/python -m infra.reference --write

console: setup-dev ## build the page of the console into api/console/static
	@$(BIN)/python -m infra.console_page --build

pictures: setup-dev ## take the pictures of the documentation again; needs Chromium
	@$(BIN)/python -m tests.screenshots
	@WEIR_PICTURES=$(CURDIR)/docs/screenshots $(PYTEST) --quiet tests/e2e/test_console_journeys.py

proto: setup-dev ## generate the Python code of the contract and of its clients
	@$(BIN)/python -m infra.generate_proto
	@$(BIN)/python -m infra.generate_sdk

proto-baseline: setup-dev ## at a release: make today's contract the one that changes are compared with
	@$(BIN)/python -m infra.check_proto --freeze

migration: setup-dev ## draft a revision from what the models say and the migrations do not; NAME="what it does"
	@$(BIN)/python -m infra.check_migrations --write "$(or $(NAME),$(error name it: make migration NAME="what it does"))"

lock: ## pin all dependencies anew; KEEP=1 moves no pin that still fits
	@$(PYTHON) -m infra.lock_dependencies --pip $(PIP_VERSION) $(if $(KEEP),--keep)

# Asks the package index, so it is none of CHECKS.
lock-check: setup-dev ## compare the hashes in requirements/image.txt and image-build.txt with the wheels of the package index
	@$(BIN)/python -m infra.lock_dependencies --pip $(PIP_VERSION) --check

dist: setup-dev ## build the packages of a release from the last commit into dist; the newest tag gives the version
	@$(BIN)/python -m infra.release

dist-check: setup-dev ## install the packages of `make dist` into clean environments and run a request through each
	@$(BIN)/python -m infra.check_dist

release-rehearsal: setup-dev ## publish a release to an index and a registry on this machine, and install it from them
	@$(BIN)/python -m infra.rehearse_release

docs: $(VENV)/.installed-docs ## build the documentation into build/docs; links and anchors are checked
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs --quiet build

clean: ## remove the virtual environment, the demo's data and all caches
	rm -rf $(VENV) .weir build sdk/python/build dist *.egg-info sdk/python/src/*.egg-info sdk/typescript/node_modules console/node_modules console/src/gen sdk/typescript/dist sdk/typescript/src/gen .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.git/*' -prune -exec rm -rf {} +

# A stamp is written after its install has succeeded, so an interrupted one is simply done again.
$(VENV)/.installed: $(LOCK) pyproject.toml sdk/python/pyproject.toml
	@$(PYTHON) -m infra.install $(VENV) --pip $(PIP_VERSION)
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed sdk/typescript/package-lock.json console/package-lock.json
	@$(PYTHON) -m infra.install $(VENV) --pip $(PIP_VERSION) --dev
	@$(BIN)/python -m infra.typescript_sdk --install & $(BIN)/python -m infra.console_page --install && wait $$!
	@touch $@

$(VENV)/.installed-docs: $(VENV)/.installed-dev requirements/docs.txt
	@$(PYTHON) -m infra.install $(VENV) --pip $(PIP_VERSION) --docs
	@touch $@
