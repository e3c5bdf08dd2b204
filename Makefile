# privfl: `make reproduce` and `make test` do all of their own set-up. `make help` lists the rest.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-builtin-rules

PYTHON ?=
TORCH  ?= default
SCALE  ?= quick
JOBS   ?= 2
VENV   ?= .venv
REPORT ?= _reports
ARGS   ?=

CPU_INDEX := https://download.pytorch.org/whl/cpu
BIN       := $(abspath $(VENV))/bin
STAMP     := $(VENV)/.installed
SITE_LOG  ?= _docs.log
# One thread per process: two processes with two threads each are many times slower than one.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1

.PHONY: help install reproduce test test-full lab export site clean distclean

help: ## show this list
	@echo "privfl: privacy in federated and wireless learning, in notebooks"
	@echo
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /:/' | awk -F: '{printf "  make %-10s  %s\n", $$1, $$2}'
	@echo
	@echo "Variables (now):"
	@echo "  PYTHON=$(PYTHON)  a Python 3.11, 3.12 or 3.13; empty: the first that works is taken"
	@echo "  TORCH=$(TORCH)  'cpu' installs torch without CUDA (2 GB instead of 8 GB of disk)"
	@echo "  SCALE=$(SCALE)  smoke (a minute or two, mechanics only), quick (the default) or full (overnight)"
	@echo "  JOBS=$(JOBS)  experiments that run at the same time"
	@echo "  ARGS=$(ARGS)  more for 'privfl run', for example ARGS=--resume to go on after a stop"

install: $(STAMP) ## make .venv and install the pinned packages; quick when nothing changed

# Finds a Python (3.11 to 3.13) by running it, because a name on the PATH may be an empty shim.
$(STAMP): settings.ini setup.py constraints.txt
	@PYTHON="$(PYTHON)" VENV="$(VENV)" TORCH="$(TORCH)" bash .ci/set_up.sh
	@echo "Installing the pinned packages into $(VENV): 3 to 15 minutes the first time. pip is silent while it unpacks torch."
ifeq ($(TORCH),cpu)
	@"$(BIN)/python" -m pip install --disable-pip-version-check --no-deps --retries 1 --timeout 15 -c constraints.txt \
		--index-url $(CPU_INDEX) torch torchvision || { \
		echo; \
		echo "torch for CPUs could not be installed from $(CPU_INDEX); pip's own message is above."; \
		echo "If that address cannot be reached from here, run the same command without TORCH=cpu (8 GB of disk)."; \
		exit 1; }
endif
	@"$(BIN)/python" -m pip install --disable-pip-version-check --use-pep517 -c constraints.txt -e '.[dev]' || { \
		echo; \
		echo "The installation did not finish; pip's own message is above. Most often it is the network or a full disk:"; \
		echo "check both and run the same command again, it goes on where it stopped."; \
		echo "Behind a proxy, set HTTPS_PROXY; with a mirror, set PIP_INDEX_URL."; \
		exit 1; }
	@touch $@

reproduce: $(STAMP) ## run every experiment at SCALE and build the report in _reports/index.html
	@"$(BIN)/privfl" run --scale $(SCALE) --jobs $(JOBS) --output $(REPORT) $(ARGS)

test: $(STAMP) ## all tests that continuous integration runs
	@$(ONE_THREAD) "$(BIN)/python" -m pytest -n 2 --dist worksteal tests

test-full: $(STAMP) ## the tests of `make test` and the heavy ones
	@$(ONE_THREAD) "$(BIN)/python" -m pytest --full -n 2 --dist worksteal tests

lab: $(STAMP) ## open the notebooks in JupyterLab
	@"$(BIN)/jupyter" lab nbs --LabApp.news_url=None $(if $(filter 0,$(shell id -u)),--allow-root)

export: $(STAMP) ## write privfl/ anew from the notebooks, and clean the notebooks
	@"$(BIN)/nbdev_export" --path nbs
	@"$(BIN)/nbdev_clean" --fname nbs

site: $(STAMP) ## build the site in _docs/ (with Quarto, or plain pages without it)
	@"$(BIN)/python" tests/site_gate.py
	@if command -v quarto > /dev/null; then \
		quarto render 2>&1 | tee $(SITE_LOG); \
		if grep -iE 'unable to resolve|citation.*not found' $(SITE_LOG); then \
			echo "The site has unresolved references or missing citations (above)."; exit 1; fi; \
		rm -f $(SITE_LOG); \
	else \
		echo "Quarto is not installed. It builds the real site: get it from https://quarto.org/docs/download/ and run 'make site' again."; \
		echo "Building plain pages instead."; \
		"$(BIN)/python" tests/site_pages.py _docs; \
	fi
	@echo "The site is at _docs/index.html"

clean: ## remove what was built (not .venv, not .data)
	rm -rf _reports _docs $(SITE_LOG) _proc _site .quarto build dist *.egg-info .pytest_cache .hypothesis
	find nbs tests privfl -name __pycache__ -o -name .ipynb_checkpoints | xargs rm -rf

distclean: clean ## remove .venv too
	[ ! -f $(VENV)/pyvenv.cfg ] || rm -rf $(VENV)
