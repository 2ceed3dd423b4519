# Each target does its own set-up and can be repeated. CI runs the same ones.
PYTHON ?= python3
VENV ?= .venv
NIXL ?= nixl-cu12==1.5.1
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q
BUILD_DIR ?= build/dev

NATIVE_SOURCES := CMakeLists.txt pyproject.toml $(wildcard cmake/*.cmake) \
	$(shell find csrc -name '*.?pp' -o -name '*.pyx' -o -name '*.pxd')

.PHONY: help
help:
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

$(VENV)/.venv-made:
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -U "pip>=25.1"
	touch $@

$(VENV)/.demo-deps: $(VENV)/.venv-made pyproject.toml
	$(PIP) install --group build --group demo
	$(PIP) install --no-deps "$(NIXL)"
	touch $@

$(VENV)/.test-deps: $(VENV)/.demo-deps
	$(PIP) install --group test
	touch $@

$(VENV)/.lint-deps: $(VENV)/.test-deps
	$(PIP) install --group lint
	touch $@

$(VENV)/.installed: $(VENV)/.demo-deps $(NATIVE_SOURCES)
	$(PIP) install --no-build-isolation --no-deps -Cbuild-dir=$(BUILD_DIR) \
		-Ccmake.define.PYNIXLKV_WERROR=ON -Ccmake.define.PYNIXLKV_TESTS=ON -e .
	touch $@

.PHONY: build
build: $(VENV)/.installed  ## build the native modules into .venv (editable)

.PHONY: demo
demo: build  ## move a real KV cache between processes and compare every byte
	$(PY) -m pynixlkv demo

.PHONY: test
test: build $(VENV)/.test-deps  ## all tests that need no accelerator
	ctest --test-dir $(BUILD_DIR) --output-on-failure
	$(PY) -m pytest
