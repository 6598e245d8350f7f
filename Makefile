# Every target sets up first where that is needed. Only Python >= 3.11 is expected to be there.
.DEFAULT_GOAL := help
.PHONY: help setup run demo test test-most test-model check check-pyright check-mypy check-rest format attack bench prove record-sdks screenshots strategies pins

# The first Python on the path that is new enough; `make setup PYTHON=/path/to/python` names another one.
PYTHON ?= $(firstword $(foreach name,python3 python3.14 python3.13 python3.12 python3.11 python,$(shell \
	$(name) -c 'import sys; sys.version_info >= (3, 11) and print("$(name)")' 2>/dev/null)))
VENV := .venv
BIN := $(VENV)/bin
RUNTIME := $(VENV)/.runtime-ready
READY := $(VENV)/.ready
MODEL_SERVER := $(VENV)/.model-server-ready
ATTACK := $(VENV)/.attack-ready
RIVALS := $(VENV)/rivals
ARGS ?=
# Floors whose own tests must reach every branch of them; those that take longest come first.
PURE := trimming dialects textscan conversation
.PHONY: $(PURE:%=test-%)
# Tests run in several processes, a whole file in one of them, in the order of tests/conftest.py: the long ones first.
TOGETHER := --numprocesses=auto --dist=loadfile --no-loadscope-reorder
# Generated examples are the same in each run, so that a change fails by what it changed; `EXAMPLES=default` makes new ones.
EXAMPLES ?= ci
PYTEST := $(BIN)/python -m pytest --quiet --hypothesis-profile=$(EXAMPLES)
# What needs nothing of each other runs at once; what each one says stays together, and all of it is said.
SIDE_BY_SIDE = $(MAKE) --no-print-directory --keep-going --jobs=2 $(if $(filter output-sync,$(.FEATURES)),--output-sync)
# Without compiled files each process that tests start compiles the package, and pytest rewrites every file of tests.
unexport PYTHONDONTWRITEBYTECODE
YAML_RULES := {extends: default, rules: {document-start: disable, line-length: {max: 120}}}

help: ## Show this list.
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1	\2/p' $(MAKEFILE_LIST) | expand -t 18

setup: $(READY) ## Make .venv with every dependency at its pinned version.

# What running needs is a third of what developing needs: `make demo` should not wait for a type checker.
$(RUNTIME): requirements.txt pyproject.toml
	$(call install,requirements.txt)
	@touch $@

$(READY): requirements-dev.txt pyproject.toml
	$(call install,requirements-dev.txt)
	@touch $(RUNTIME) $@

$(MODEL_SERVER): requirements-model-server.txt $(READY)
	$(call install,requirements-model-server.txt)
	@touch $@

$(ATTACK): requirements-attack.txt $(READY)
	$(call install,requirements-attack.txt)
	@touch $@

# Packages that others wrote for the same end, apart: what they need must not meet what runs.
$(RIVALS)/.ready: requirements-prove.txt $(RUNTIME)
	@if command -v uv >/dev/null; then set -ex; \
		uv venv --quiet --clear --python "$(PYTHON)" $(RIVALS); \
		uv pip install --quiet --python $(RIVALS)/bin/python -r $<; \
	else set -ex; \
		"$(PYTHON)" -m venv --clear $(RIVALS); \
		$(RIVALS)/bin/python -m pip install --quiet --disable-pip-version-check -r $<; \
	fi
	@touch $@

define install
@test -n "$(PYTHON)" || { echo "Palimpsest needs Python 3.11 or newer on the path, or: make setup PYTHON=/path/to/python" >&2; exit 1; }
@if command -v uv >/dev/null; then set -ex; \
	test -x $(BIN)/python || uv venv --quiet --python "$(PYTHON)" $(VENV); \
	uv pip install --quiet --compile-bytecode --python $(BIN)/python --require-hashes -r $(1); \
	uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation -e .; \
else set -ex; \
	test -x $(BIN)/pip || "$(PYTHON)" -m venv $(VENV); \
	$(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --require-hashes -r $(1); \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .; \
	$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true; \
fi
endef

run: $(RUNTIME) ## Serve, with config.yaml or built-in defaults (ARGS="--port 9000").
	$(BIN)/palimpsest serve $(ARGS)

demo: $(RUNTIME) ## Show the main job on a recorded conversation; no key, no network.
	$(BIN)/palimpsest demo $(ARGS)

test: $(READY) ## Run every test, PostgreSQL included, and the coverage gate of the pure floors.
	@+$(SIDE_BY_SIDE) test-most $(PURE:%=test-%)

# Many of these wait for others: the pure floors' tests, which reckon only, take the time that is left over.
# The plus lets it say at once how far it is.
test-most: $(READY)
	+$(PYTEST) $(TOGETHER) $(PURE:%=--ignore=tests/%) $(ARGS)

# Each counts into a file of its own: they run at once.
$(PURE:%=test-%): test-%: $(READY)
	COVERAGE_FILE=$(VENV)/.coverage-$* $(PYTEST) tests/$* --cov=proxy.$* --cov-branch --cov-fail-under=100

test-model: $(MODEL_SERVER) ## Run the tests against a real model server, which is installed first (30 MB).
	$(BIN)/python -m pytest --quiet -m model_server tests/e2e/test_model_server.py $(ARGS)

check: $(READY) ## Lint, types, architecture, the example configuration, the container files.
	@+$(SIDE_BY_SIDE) check-pyright check-mypy check-rest

check-pyright: $(READY)
	$(BIN)/basedpyright

check-mypy: $(READY)
	$(BIN)/mypy

check-rest: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports
	$(BIN)/palimpsest check --config config.example.yaml
	$(BIN)/hadolint --failure-threshold style Dockerfile
	$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker-compose.yml
	$(BIN)/yamllint --strict --config-data '$(YAML_RULES)' docker-compose.yml config.example.yaml examples/policies
	$(BIN)/python -m pytest --quiet tests/test_docs.py

attack: $(ATTACK) ## Attack with bodies, answers, routes and imports that no run had before (10 minutes each; SECONDS=60).
	PALIMPSEST_ATTACK_SECONDS=$(or $(SECONDS),600) $(BIN)/python -m pytest --quiet -m "attack or not attack" \
		tests/hostile/test_fuzz.py tests/hostile/test_openapi.py $(ARGS)

bench: $(RUNTIME) ## Measure what the proxy costs (10 minutes; ARGS="--quick", "--only NAME", "--profile"). Linux, with a C compiler.
	$(BIN)/python -m benchmarks $(ARGS)

prove: $(RIVALS)/.ready ## Compare with other packages on recorded sessions; writes the README's table (3 minutes; 500 MB of packages).
	$(BIN)/python -m benchmarks.prove --rivals $(RIVALS)/bin/python $(or $(ARGS),--write)

record-sdks: $(READY) ## Record anew what nine SDKs send (600 MB of environments; needs npm; ARGS="openai agno" for some).
	$(BIN)/python -m tests.sdks.record $(ARGS)

screenshots: $(READY) ## Make the pictures of docs/images anew, in Chromium.
	PALIMPSEST_SCREENSHOTS=1 $(BIN)/python -m pytest --quiet tests/dashboard/test_browser.py -k documentation

strategies: $(READY) ## Write docs/strategies.md anew, from what the edits do.
	$(BIN)/python -m tests.support.strategies

format: $(READY) ## Put the code in form.
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Extras are pinned by name: a pip before 23.3 otherwise takes the newest release for `coverage[toml]`, which has no hash here.
COMPILE := uv pip compile --quiet --universal --generate-hashes --no-emit-index-url --no-emit-find-links \
	--no-annotate --no-strip-extras --custom-compile-command 'make pins'

pins: ## Choose the newest versions anew and pin them with their hashes (needs uv).
	$(COMPILE) --upgrade pyproject.toml --group build -o requirements.txt
	$(COMPILE) --upgrade pyproject.toml --group dev -o requirements-dev.txt
	$(COMPILE) --upgrade --group otel --constraint requirements-dev.txt -o requirements-otel.txt
	$(COMPILE) --upgrade --group psycopg --constraint requirements-dev.txt -o requirements-psycopg.txt
	$(COMPILE) --upgrade --group attack --constraint requirements-dev.txt -o requirements-attack.txt
	$(COMPILE) --upgrade --group model-server -o requirements-model-server.txt
