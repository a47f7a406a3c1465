# make build   .venv with torch, the tools and the compiled module
# make test    the tests           make demo    the demo
# make lint    the linters         make bench   the benchmarks (BENCH_ARGS=--quick: under two minutes)
# make cuda-proof  executes and checks the CUDA kernels without a GPU (all parts; needs nvcc)
# make gpu-check  tests and times the CUDA kernels on this machine's GPU, with the python3 that has a CUDA build of torch
# make docs    the documentation, in build/docs: plain files, index.html opens from disk
# make wheel   one wheel with modules for every supported torch, and one that computes with plain torch, in dist
# make release everything that a release needs, in dist; uploads nothing (RELEASE_ARGS=--draft leaves the checks out)
# make release-check  tests the wheel in dist with several releases of torch and every installed Python
# make aarch64-check  cross-compiles the CPU kernels for 64-bit ARM and tests them on an emulator (qemu)
# make clean   removes the files of the build, but not .venv
#
# EXTRAS=dev,peers also installs the libraries that some tests compare with (kornia, netcal, transformers, ...); without
# a GPU add PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, for CPU builds of both torch and torchvision.
# PYTHON=python3.12 and FOCALKERN_TORCH=2.11.0 choose the versions (of a new .venv, and of torch in it);
# FOCALKERN_CUDA and TORCH_CUDA_ARCH_LIST are read by setup.py; PYTEST_ARGS="-k map" is handed to pytest.

PYTHON ?= python3
VENV ?= .venv
FOCALKERN_TORCH ?= 2.13.0
EXTRAS ?= dev

BIN := $(VENV)/bin
comma := ,
TORCH := torch==$(patsubst torch==%,%,$(FOCALKERN_TORCH))
PIP := $(BIN)/python -m pip --disable-pip-version-check
SOURCES := $(shell find csrc -type f)

# The names of the stamps contain the settings, so that other settings have other stamps.
TORCH_STAMP := $(VENV)/.stamp-$(TORCH)
INSTALL_STAMP := $(VENV)/.stamp-install-$(subst $(comma),-,$(EXTRAS))
BUILD_STAMP := $(VENV)/.stamp-build-cuda-$(or $(FOCALKERN_CUDA),auto)

.PHONY: build test demo lint bench docs wheel release release-check aarch64-check cuda-proof gpu-check clean
.DELETE_ON_ERROR:

build: $(BUILD_STAMP)

test: build
	$(BIN)/python -m pytest $(PYTEST_ARGS)

demo: build
	$(BIN)/focalkern demo

bench: build
	$(BIN)/python -m benchmarks $(BENCH_ARGS)

# Executes the tutorials; a warning is an error.
docs:
	@$(MAKE) --no-print-directory build EXTRAS=$(EXTRAS),docs
	$(BIN)/python -m sphinx --quiet --fail-on-warning --keep-going --builder html --doctree-dir build/doctrees $(SPHINX_ARGS) docs build/docs
	@echo "$(CURDIR)/build/docs/index.html"

# For this Python; WHEEL_ARGS="--no-cuda --torch 2.13.0" for a part.
wheel: build
	$(BIN)/python -m tools.wheel $(WHEEL_ARGS)

# Checks, wheels, source archive, notes, software bill and digests. It uploads nothing.
release: build
	$(BIN)/python -m tools.release $(RELEASE_ARGS)

# The same wheel file with each of them: RELEASE_CHECK_ARGS="--python python3.13 --torch 2.13.0 2.15.0" for a part.
release-check: build
	$(BIN)/python -m tools.release_check $(RELEASE_CHECK_ARGS)

# Needs g++-aarch64-linux-gnu and qemu-user-static. The first run downloads Debian's Python and PyPI's torch for ARM.
aarch64-check: build
	$(BIN)/python -m tools.aarch64 $(AARCH64_CHECK_ARGS)

# Needs nvcc; machine code is a part where cuobjdump and nvdisasm are (see tools/cuda/instruction_counts.py).
cuda-proof: build
	$(BIN)/python -m tools.cuda.proof --out benchmarks/results/cuda_proof.md $(CUDA_PROOF_ARGS)

# Not in .venv: a machine with a GPU has its own torch, and often no network.
gpu-check:
	$(PYTHON) -m benchmarks.gpu_check $(GPU_CHECK_ARGS)

lint: build
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)
	$(BIN)/mypy

clean:
	rm -rf build dist *.egg-info focalkern/_C*.so focalkern/libfocalkern_*.so focalkern/_build_info.py $(VENV)/.stamp-install-* $(VENV)/.stamp-build-*

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "focalkern needs Python 3.11 or newer: make PYTHON=...")'
	@# Debian's Python comes without ensurepip; an existing pip then installs pip into the environment.
	$(PYTHON) -m venv $(VENV) || { $(PYTHON) -m venv --without-pip $(VENV) && $(PYTHON) -m pip --python $(VENV) install pip; }

# torch comes first, alone and in the exact version: other packages would accept another version.
$(TORCH_STAMP): | $(BIN)/python
	rm -f $(VENV)/.stamp-*
	$(PIP) install $(TORCH) setuptools wheel
	touch $@

$(INSTALL_STAMP): $(TORCH_STAMP) pyproject.toml setup.py
	$(PIP) install --no-build-isolation --editable '.[$(EXTRAS)]' $(TORCH)
	@# TorchCP's dependency torchsort has no wheel, and its build fails where nvcc is without a GPU. No test needs it.
	@case "$(EXTRAS)" in *peers*) $(PIP) install --no-deps torchcp ;; esac
	@# PyPI's torchvision, a CUDA build, does not load beside a CPU build of torch, nor does any peer that imports it.
	@case "$(EXTRAS)" in *peers*) $(BIN)/python -W ignore -c "import torchvision" 2> /dev/null || \
	  echo "torchvision does not load beside this torch: outside of the tests, torchmetrics does not either. Remedy: make" \
	    "build EXTRAS=$(EXTRAS) VENV=.venv-cpu PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu" ;; esac
	touch $@

# Only what changed is compiled again.
$(BUILD_STAMP): $(INSTALL_STAMP) $(SOURCES)
	rm -f $(VENV)/.stamp-build-*
	$(BIN)/python setup.py build_ext --inplace
	@# Only the import finds an undefined symbol.
	$(BIN)/python -c 'import focalkern; print("built:", focalkern.build_info())'
	touch $@
