# make demo    train small nests on the digits, ask a trained network live, and write runs/demo/report.html
# make test    run every test (Chromium is installed for the browser tests where the system allows it), first a sweep on Ray
# make check   lint, formatting, types
# make docs    the documentation as a site: build/site/index.html
#
# Each makes .venv and installs what it needs; after the first time that takes no time.
# PYTHON=python3.12 picks an interpreter, PIP_FLAGS="..." is handed to pip (such as the index of CPU-only
# PyTorch builds), TESTS="tests/test_recipe.py -k override" picks tests.

SHELL := bash
PYTHON ?= python3
PIP_FLAGS ?=
TESTS ?=
WORKERS ?= 2
RAY_SECONDS ?= 90
BIN := .venv/bin
PROJECT := pyproject.toml constraints.txt
DEMO := data,report,export,serve
DEV := data,report,export,serve,compare,docs,dev

.PHONY: demo test test-ray check docs browser constraints clean

demo: .venv/installed-demo
	$(BIN)/nestling demo
	@echo "The report is $(CURDIR)/runs/demo/report.html"

test: .venv/installed-dev browser $(if $(TESTS),,test-ray)
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile $(TESTS)

# A Ray cluster of one node, in a process of its own that is ended if it hangs: nothing that befalls it reaches other tests.
# Whether tests pass is never tried twice; a process that hung or was killed is, once.
test-ray: .venv/installed-dev
	@[ .venv/installed-ray -nt constraints.txt ] || { echo "Installing Ray into .venv"; \
	  $(BIN)/python -m pip install -q $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt ray 2>.venv/pip-ray.log \
	    && touch .venv/installed-ray || tail -n 1 .venv/pip-ray.log; }
	@if $(BIN)/python -c 'import ray' 2>/dev/null; then \
	  for try in first second; do \
	    $(if $(shell command -v timeout),timeout -k 5 $(RAY_SECONDS)) $(BIN)/python -m pytest -m ray -rs tests/test_ray.py; code=$$?; \
	    [ $$code -ge 124 ] || exit $$code; \
	    echo "The tests on Ray hung for $(RAY_SECONDS) s or were killed (exit code $$code, $$try try)"; \
	  done; exit $$code; \
	else echo "Ray could not be installed: sweeps on Ray are skipped"; fi

check: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: .venv/installed-dev
	$(BIN)/python -m mkdocs build --strict
	@echo "The site is $(CURDIR)/build/site/index.html"

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "nestling needs Python 3.11 or newer; found $$($(PYTHON) --version 2>&1). Try make PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv .venv

# Progress is one line per package fetched; pip's warnings are kept in .venv/pip.log and shown if it fails.
define install
	@echo "Installing nestling[$(1)] into .venv (minutes the first time)"
	@set -o pipefail; $(BIN)/python -m pip install $(PIP_FLAGS) --disable-pip-version-check -c constraints.txt \
	  -e '.[$(1)]' 2>.venv/pip.log | awk '/^Collecting/ {print "  " $$2; fflush()} \
	    /^Processing .*whl/ {sub(".*/", ""); print "  " $$1; fflush()} /^Installing collected/ {print "  unpacking"; fflush()}' \
	  || { grep -v '^WARNING: Location' .venv/pip.log; exit 1; }
	@touch $@
endef

.venv/installed-demo: $(PROJECT) | .venv/bin/python
	$(call install,$(DEMO))

.venv/installed-dev: $(PROJECT) | .venv/bin/python
	$(call install,$(DEV))

browser:
	@if command -v chromium chromium-browser google-chrome >/dev/null; then :; \
	elif [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	  echo "Installing Chromium for the browser tests"; \
	  { apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends chromium; } >/dev/null 2>&1 \
	    || echo "Chromium could not be installed: the browser tests will be skipped"; \
	else echo "There is no Chromium: the browser tests will be skipped"; fi

# Pins what is installed now; triton and nvidia packages are left out, because torch's own builds pin them.
constraints: .venv/installed-dev
	$(BIN)/python -m pip freeze --all --exclude-editable | grep -vE '^(nvidia|triton|pip==)' | sed 's/+cpu$$//' > constraints.txt

clean:
	rm -rf .venv build dist .pytest_cache .hypothesis .ruff_cache .mypy_cache
