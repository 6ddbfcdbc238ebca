.DEFAULT_GOAL := help
.PHONY: help setup demo test lint format bench clean

PYTHON_VENV := .venv/bin/python
# horovodrun, mpirun and the linters come from the environment
WITH_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"

help:            ## this list
	@grep -E '^[a-z]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 10

setup:           ## .venv with pinned packages and a Horovod built for them (about 8 minutes once, then seconds)
	@bash ci/setup.sh

demo: setup      ## train MNIST on 2 ranks, compressed and dense, and compare (below 5 minutes)
	@$(WITH_VENV) $(PYTHON_VENV) examples/demo.py

test: setup      ## all tests, those with several processes too, and the coverage (below 15 minutes)
	@$(WITH_VENV) $(PYTHON_VENV) -m pytest --cov --cov-report=term $(ARGS)

lint: setup      ## style, format, types, direction of imports
	@$(WITH_VENV) ruff check .
	@$(WITH_VENV) ruff format --check .
	@$(WITH_VENV) mypy
	@$(WITH_VENV) lint-imports

format: setup    ## let ruff format and fix what it can
	@$(WITH_VENV) ruff format .
	@$(WITH_VENV) ruff check --fix .

bench: setup     ## kernel speeds against memcpy
	@$(WITH_VENV) $(PYTHON_VENV) benchmarks/kernels.py $(ARGS)

clean:           ## remove build and cache folders; .venv and the Horovod wheel in the user's cache stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
		.coverage .coverage.* htmlcov
	@find . -name __pycache__ -type d -not -path './.venv/*' -prune -exec rm -rf {} +
