# `make demo` and `make test` are the two commands of the README; each does all the set-up it needs.

PYTHON ?= python3
VENV_PYTHON := .venv/bin/python
INSTALLED := .venv/requirements-installed
BUILD := $(VENV_PYTHON) setup.py build_kernel

# What CUDA is compiled for where nvcc is found: this machine's GPUs, else Hopper. `make build-all` compiles every one.
GPUS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+$$')
GPU_ARCH ?= $(if $(GPUS),native,9.0)
OUT ?= benchmarks/results

.PHONY: demo test test-emulated test-gpu bench-gpu sanitize build build-all bench digest lint clean

demo: build
	$(VENV_PYTHON) examples/generate.py

test: build
	$(VENV_PYTHON) -m pytest tests

# The CUDA kernels compiled for the host, without a GPU: what a few test files say of their indices, barriers and bits. As on
# Hopper, then with three multiprocessors, whose blocks take many tasks each, then the chunk kernel of the other archs.
EMULATED_TESTS ?= tests/test_chunk.py tests/test_chunk_high.py tests/test_scan.py tests/test_checkpoints.py tests/test_slots.py tests/test_gates_norm.py tests/test_conv.py
test-emulated: $(INSTALLED)
	folder=$$($(VENV_PYTHON) -m tools.emulate) && \
	  LOCAL_KERNELS=org/gated-deltanet=$$folder $(VENV_PYTHON) -m pytest $(EMULATED_TESTS) && \
	  LOCAL_KERNELS=org/gated-deltanet=$$folder EMULATED_SMS=3 $(VENV_PYTHON) -m pytest tests/test_chunk_rows.py && \
	  LOCAL_KERNELS=org/gated-deltanet=$$folder EMULATED_HOPPER=0 $(VENV_PYTHON) -m pytest tests/test_chunk.py

# These three: a variant that is already built, with the packages that PYTHON has, no virtual environment, no network.
test-gpu:
	$(PYTHON) -m pytest tests --device cuda

bench-gpu:
	$(PYTHON) benchmarks/run_all.py $(OUT)

sanitize:
	$(PYTHON) tests/sanitize.py

build: $(INSTALLED)
	$(BUILD) --arch $(GPU_ARCH)

build-all: $(INSTALLED)
	$(BUILD)

bench: build
	$(VENV_PYTHON) benchmarks/run_all.py $(OUT)

digest:
	@$(PYTHON) setup.py source_digest

lint: $(INSTALLED)
	$(VENV_PYTHON) -m ruff check .

clean:
	rm -rf build .build

$(INSTALLED): requirements-dev.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
	  "error: $(PYTHON) is too old, the development tools need Python 3.11; name a newer one with PYTHON=")'
	$(PYTHON) -m venv .venv
	$(VENV_PYTHON) -m pip install --quiet --requirement requirements-dev.txt
	@touch $@
