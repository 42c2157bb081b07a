# Two commands for a fresh machine that has Python >= 3.11, make and a C library: `make demo` and `make test`.
# Each makes .venv on its first run and installs what constraints.txt pins.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.gpuenergyd-installed
RIVAL  := $(VENV)/.rival-installed
REPORT ?= gpuenergyd-demo-report.html
# Each worker takes half of the files in order, so that what a file sets up is set up once, and helps the other at the end.
PYTEST_ARGS ?= -n 2 --dist worksteal
SAMPLE ?= 200
SEED   ?= 1

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
# The checks find their settings, and codespell its files, from here; tools that start others find them in the venv.
export PATH := $(abspath $(BIN)):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help install demo docs package test check lint types layers spelling format unit again frameworks coverage mutation fuzz audit pythons bench bench-planner bench-profiling bench-carbon bench-emulation clean

help:  ## list the targets
	@grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST)) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -E '^[a-z-]+:.*## ' $(firstword $(MAKEFILE_LIST))

install: $(STAMP)  ## make .venv with everything in it

# torch comes first and alone: where a CPU build is at hand, pip takes it and leaves gigabytes of CUDA wheels alone.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Python >= 3.11 is needed, %s is %s; set one with: make PYTHON=python3.12 ..." % (sys.executable, sys.version.split()[0]))'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "installing into $(VENV): a few minutes, once"
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

demo: $(STAMP)  ## train a real pipeline on four simulated GPUs under the daemon, and print what it saved
	$(BIN)/gpuenergyd demo --out $(REPORT)

docs: $(STAMP)  ## the site, generated reference included, into build/docs/
	$(BIN)/python -m docs.site build/docs

test: check unit  ## every check and every test: the one command that CI runs too

check: lint types layers spelling  ## every check that runs no test

lint: $(STAMP)  ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(STAMP)  ## mypy and pyright
	$(BIN)/mypy
	$(BIN)/mypy benchmarks/runs
	$(BIN)/pyright

layers: $(STAMP)  ## import-linter: the arrows of the architecture
	$(BIN)/lint-imports --no-logo

spelling: $(STAMP)  ## codespell
	$(BIN)/codespell

unit: $(STAMP)  ## pytest; PYTEST_ARGS chooses
	$(BIN)/python -m pytest $(PYTEST_ARGS)

again: $(STAMP)  ## the tests that have just failed, one at a time; it fails too where none has
	@echo "run again, alone: what failed in company; whoever passes now is unstable and wants mending" >&2
	$(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none

frameworks: $(STAMP)  ## an environment for each training framework, for the adapters' own tests
	$(BIN)/python -m tests.support.framework_environments

format: $(STAMP)  ## let ruff mend what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

coverage: $(STAMP)  ## the tests once more, slower, counting lines that run, in child processes and kernels too; it fails below 92 %, or 98 % in core and policies
	-$(BIN)/python -m tests.support.framework_environments
	$(BIN)/python benchmarks/runs/line_coverage.py $(COVERAGE_ARGS)

mutation: $(STAMP)  ## small wrong changes to core and planning: do the tests notice? SAMPLE=200 SEED=1; it fails below 80 %
	$(BIN)/python benchmarks/runs/mutation.py --sample $(SAMPLE) --seed $(SEED) $(MUTATION_ARGS)

fuzz: $(STAMP)  ## 100,000 mutated messages over the sockets, as many in process; made-up requests from the API description
	FUZZ_MESSAGES=100000 timeout 1500 $(BIN)/python -m pytest -q -s tests/daemon/api/test_socket_fuzz.py tests/daemon/api/test_fuzz.py tests/daemon/api/test_schemathesis.py

# What the planner is compared with, where it can be had: without it that comparison says that it was not installed.
$(RIVAL): $(STAMP)
	-@$(BIN)/python -m pip install --quiet --constraint constraints.txt lowtime==0.3.0 && touch $@

bench: $(STAMP) $(RIVAL)  ## every benchmark, an hour at most, and docs/benchmarks.md from it; ONLY="store load" runs these alone
	$(BIN)/python -m benchmarks.report $(if $(ONLY),--only $(ONLY)) $(BENCH_ARGS)

bench-planner: $(STAMP)  ## time the planner on pipelines of growing size
	$(BIN)/python benchmarks/runs/planner.py

bench-profiling: $(STAMP)  ## iterations, regret and slowdown of online profiling beside EnvPipe's and a full sweep
	$(BIN)/python benchmarks/runs/profiling.py

bench-carbon: $(STAMP)  ## forecast skill and captured share of the timing gain, per zone
	$(BIN)/python benchmarks/runs/carbon.py

bench-emulation: $(STAMP)  ## GPT-3 175B on up to 8,192 GPUs: EnvPipe, Perseus and ours, with and without a straggler
	$(BIN)/python benchmarks/runs/emulation.py

package: $(STAMP)  ## wheel, sdist, Debian package and bill of materials into dist/, the same bytes for the same commit
	$(BIN)/python -m tools.release dist

audit: $(STAMP)  ## known vulnerabilities of what constraints.txt pins; asks the index, or a copy of the PyPA's advisory database: ADVISORIES=folder
	@test -n "$(ADVISORIES)" -o -x build/audit/bin/pip-audit || { $(BIN)/python -m venv build/audit && build/audit/bin/pip install --quiet pip-audit; }
	$(BIN)/python -m tools.release.audit $(if $(ADVISORIES),--advisories $(ADVISORIES),build/audit/bin/pip-audit)

pythons: $(STAMP)  ## the wheel on every Python from 3.11 to 3.14 that can be had
	tools/ci/pythons

clean:  ## remove .venv and what tools left behind
	rm -rf $(VENV) .frameworks dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
