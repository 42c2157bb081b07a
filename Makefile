# Two commands for a fresh machine with Python >= 3.11 and make: `make demo` and `make test`.
# Each creates .venv on its first run and installs what constraints.txt pins.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.gpuenergyd-installed
RIVAL  := $(VENV)/.rival-installed
REPORT ?= gpuenergyd-demo-report.html
# Six workers for two cores, since many tests wait for other processes. A file runs in one worker, so that its module
# fixtures are set up once; tests/conftest.py puts the longest files first.
PYTEST_ARGS ?= --workers 6
SAMPLE ?= 200
SEED   ?= 1

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# Keep compiled modules whatever the environment says: the tests start hundreds of processes that import them.
export PYTHONDONTWRITEBYTECODE :=
# Tools that start other tools find them in the virtual environment.
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install demo docs pages package test test-thorough check house lint types pyright layers spelling format unit again frameworks coverage mutation fuzz audit pythons bench bench-planner bench-profiling bench-carbon bench-emulation clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)  ## create .venv with all dependencies

# torch is installed first and alone, so that pip can choose a CPU build and skip gigabytes of CUDA wheels.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python >= 3.11 is needed, %s is %s; set one with: make PYTHON=python3.12 ..." % (sys.executable, sys.version.split()[0]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes, once"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	-$(BIN)/python -m gpuenergyd_policies.planning.kernel_cache
	@touch $@

demo: $(STAMP)  ## train a real pipeline on four simulated GPUs under the daemon and print the savings
	$(BIN)/gpuenergyd demo --out $(REPORT)

pages: $(STAMP)  ## write the generated pages, pictures and figures of the documents
	$(BIN)/python -m tests.support.faults
	$(BIN)/python -m benchmarks.report --render

docs: $(STAMP)  ## build the documentation site into build/docs/
	$(BIN)/python -m docs.site build/docs

test: $(STAMP)  ## the quick checks and the usual tests: 7 to 10 minutes on two cores
	@$(MAKE) --no-print-directory --jobs 2 --output-sync lint layers spelling
	@$(MAKE) --no-print-directory unit

check: lint types pyright layers spelling  ## all static checks

house: $(STAMP)  ## print the size of the code, with limits and targets
	$(BIN)/python -m tools.quality.house

lint: $(STAMP)  ## ruff: rules and formatting
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## mypy
	$(BIN)/mypy

pyright: $(STAMP)  ## pyright, the type checker of many editors: a minute
	$(BIN)/pyright

layers: $(STAMP)  ## import-linter: the architecture's layers
	$(BIN)/lint-imports --no-logo

spelling: $(STAMP)  ## codespell
	$(BIN)/codespell

unit: $(STAMP)  ## pytest with PYTEST_ARGS, without the tests marked as thorough
	$(BIN)/python -m pytest -m "not thorough" $(PYTEST_ARGS)

# Property tests are in both runs: here with ten times as many examples.
test-thorough: $(STAMP)  ## the tests marked as thorough, and property tests with all their examples
	$(BIN)/python -m pytest -m "thorough or hypothesis" --hypothesis-profile=thorough $(PYTEST_ARGS)

again: $(STAMP)  ## run the tests that have just failed once more, one at a time
	@echo "running failed tests again, one at a time; a test that passes now is flaky: fix it" >&2
	$(BIN)/python -m pytest --hypothesis-profile=thorough --last-failed --last-failed-no-failures none

frameworks: $(STAMP)  ## virtual environments for the tests with training frameworks and third-party tools
	$(BIN)/python -m tests.support.tools_environment
	$(BIN)/python -m tests.support.framework_environments

format: $(STAMP)  ## apply ruff's fixes and formatting
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

coverage: $(STAMP)  ## line coverage of all tests; fails below 92 %, or 98 % in core and policies
	-$(BIN)/python -m tests.support.framework_environments
	$(BIN)/python benchmarks/runs/line_coverage.py $(COVERAGE_ARGS)

mutation: $(STAMP)  ## mutation testing of core and the planner (SAMPLE=200 SEED=1); fails below 80 %
	$(BIN)/python benchmarks/runs/mutation.py --sample $(SAMPLE) --seed $(SEED) $(MUTATION_ARGS)

fuzz: $(STAMP)  ## fuzz the sockets with 100,000 mutated messages and the HTTP API with generated requests
	FUZZ_MESSAGES=100000 timeout 1500 $(BIN)/python -m pytest -q -s tests/daemon/api/test_socket_fuzz.py tests/daemon/api/test_fuzz.py tests/daemon/api/test_schemathesis.py

# lowtime, which the planner is compared with; without it the comparison reports that it is missing.
$(RIVAL): $(STAMP)
	-@$(BIN)/python -m pip install --quiet --constraint constraints.txt lowtime==0.3.0 && touch $@

bench: $(STAMP) $(RIVAL)  ## run all benchmarks (an hour at most) and write docs/reference/benchmarks.md; ONLY="store load" selects some
	$(BIN)/python -m benchmarks.report $(if $(ONLY),--only $(ONLY)) $(BENCH_ARGS)

bench-planner: $(STAMP)  ## time the planner on pipelines of growing size
	$(BIN)/python benchmarks/runs/planner.py

bench-profiling: $(STAMP)  ## compare plans with EnvPipe's and those of a full sweep: iterations, regret, slowdown
	$(BIN)/python benchmarks/runs/profiling.py

bench-carbon: $(STAMP)  ## forecast skill and captured share of the timing gain, per zone
	$(BIN)/python benchmarks/runs/carbon.py

bench-emulation: $(STAMP)  ## emulate GPT-3 175B on up to 8,192 GPUs: EnvPipe, Perseus and this planner
	$(BIN)/python benchmarks/runs/emulation.py

package: $(STAMP)  ## build wheel, sdist, Debian package, RPM and bill of materials into dist/, reproducibly
	$(BIN)/python -m tools.release dist

audit: $(STAMP)  ## audit the pinned dependencies for known vulnerabilities; ADVISORIES=folder reads a copy of the PyPA's database
	@test -n "$(ADVISORIES)" -o -x build/audit/bin/pip-audit || { $(BIN)/python -m venv build/audit && build/audit/bin/pip install --quiet pip-audit; }
	$(BIN)/python -m tools.release.audit $(if $(ADVISORIES),--advisories $(ADVISORIES),build/audit/bin/pip-audit)

pythons: $(STAMP)  ## test the wheel on Python 3.11 to 3.14
	tools/ci/pythons

clean:  ## remove .venv, caches and build results
	rm -rf $(VENV) .frameworks dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
