.DEFAULT_GOAL := help
.PHONY: help setup setup-keras2 demo test test-rest test-exhaustive test-keras2 test-all fresh test-cuda-build test-gpu bench-gpu coverage test-faults fuzz-states soak lint format bench reproduce test-engines docs docs-links clean

PYTHON_VENV := .venv/bin/python
# horovodrun, mpirun and the linters come from the environment
WITH_VENV := PATH="$(CURDIR)/.venv/bin:$$PATH"
WITH_VENV_KERAS2 := PATH="$(CURDIR)/.venv-keras2/bin:$$PATH"

help:                ## this list
	@grep -E '^[a-z0-9-]+: .*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*##/\t/' | expand -t 17

setup:               ## .venv with pinned packages and a Horovod built for them (about 8 minutes once, then seconds)
	@bash ci/setup.sh

setup-keras2:        ## .venv-keras2 with TensorFlow 2.15, whose Keras is Keras 2, and a Horovod for it (Python 3.11)
	@bash ci/setup.sh keras2

demo: setup          ## train MNIST on 2 ranks, compressed and dense, and compare (below 5 minutes)
	@$(WITH_VENV) $(PYTHON_VENV) examples/demo.py

test: setup          ## each guarantee once, with real ranks (about 20 minutes on 2 cores); ARGS names tests, and none is left out
ifdef ARGS
	@$(WITH_VENV) $(PYTHON_VENV) -m pytest $(ARGS)
else
	@$(WITH_VENV) bash ci/test.sh
endif

test-rest: setup     ## the same with other numbers of ranks, launchers and settings (about 45 minutes)
	@$(WITH_VENV) bash ci/test.sh rest

test-exhaustive: setup  ## all that those two leave out: products of settings whose parts they have shown (before a release)
	@$(WITH_VENV) bash ci/test.sh exhaustive

# tracing the ranks takes a quarter more, so that `test` goes without
coverage: setup      ## the tests of `make test` and `make test-rest`, and which lines of the package they have run
	@$(WITH_VENV) $(PYTHON_VENV) -m pytest --cov --cov-report=term $(ARGS)

test-keras2: setup-keras2  ## the TensorFlow and Keras tests, and those of the core, with TensorFlow 2.15 and Keras 2
	@$(WITH_VENV_KERAS2) .venv-keras2/bin/python -m pytest tests/unit --ignore-glob "tests/unit/test_reproduce_*" \
		--ignore-glob "tests/unit/test_cuda_*" --ignore tests/unit/test_device_memory.py --ignore tests/unit/test_ddp.py \
		tests/parallel/test_tensorflow.py tests/parallel/test_keras.py $(ARGS)

test-all: test test-rest test-exhaustive test-keras2  ## all four

fresh:               ## `make demo` in clean roots of Debian 12, 13 and testing (root and debootstrap; an hour; ARGS: see ci/fresh.sh)
	@ci/fresh.sh $(ARGS)

test-cuda-build:     ## Horovod with CUDA and NCCL from packages of the index, trained on the CPU (any machine; 15 minutes, 8 GB)
	@bash ci/test_cuda_build.sh

test-gpu: setup      ## kernels and exchanges on the GPU that is here (a CUDA device, and a torch with CUDA)
	@HVD_COMPRESS_TEST_GPU=1 $(WITH_VENV) $(PYTHON_VENV) -m pytest tests/unit/test_device_memory.py tests/unit/test_cuda_*.py tests/parallel/test_device.py

bench-gpu: setup     ## how fast kernels and training steps are on that GPU, into benchmarks/results/
	@$(WITH_VENV) $(PYTHON_VENV) benchmarks/gpu.py --out benchmarks/results/gpu.json
	@$(WITH_VENV) horovodrun -np 2 --gloo $(PYTHON_VENV) benchmarks/gpu_steps.py --out benchmarks/results/gpu_steps.json

test-faults: setup   ## ranks that are killed, raise, stop or do something else, beside plain Horovod (about 20 minutes; ARGS: see tests/faults)
	@$(WITH_VENV) $(PYTHON_VENV) -m tests.faults $(ARGS)

fuzz-states: setup   ## 50,000 damaged and foreign saved states, each taken wholly or refused (ARGS="--seed 1")
	@$(WITH_VENV) $(PYTHON_VENV) -m tests.faults.states $(ARGS)

soak: setup          ## memory, descriptors, threads and step times over 50,000 steps (about two hours; ARGS="--scale 0.01 --part drop")
	@$(WITH_VENV) $(PYTHON_VENV) -m tests.faults.soak $(ARGS)

lint: setup          ## style, format, types, direction of imports
	@$(WITH_VENV) ruff check .
	@$(WITH_VENV) ruff format --check .
	@$(WITH_VENV) mypy
	@$(WITH_VENV) lint-imports

format: setup        ## let ruff format and fix what it can
	@$(WITH_VENV) ruff format .
	@$(WITH_VENV) ruff check --fix .

bench: setup         ## what compression is worth, into benchmarks/results/ (a quarter of an hour; root for slow links; ARGS=--long)
	@$(WITH_VENV) $(PYTHON_VENV) benchmarks $(ARGS)

reproduce: setup     ## the papers' experiments, into docs/reproductions.md (about two hours; root for slow links; ARGS=--full: days)
	@$(WITH_VENV) $(PYTHON_VENV) -m benchmarks.reproduce $(ARGS)

test-engines: setup  ## ranks on Ray and Spark, in .venv-engines: what .venv has, and ray, pyspark, pyarrow (a Java for Spark)
	@bash ci/test_engines.sh

docs: setup          ## the site, into build/docs (its packages come on the first call; a warning is an error)
	@bash ci/docs.sh html

docs-links: setup    ## whether the site's links to other sites lead somewhere (needs a network)
	@bash ci/docs.sh linkcheck

clean:               ## remove build and cache folders; .venv* and the Horovod wheels in the user's cache stay
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache \
		.coverage .coverage.* htmlcov
	@find . -name __pycache__ -type d -not -path './.venv*' -prune -exec rm -rf {} +
