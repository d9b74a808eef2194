# Everything below works from a bare machine with python3, pip and make: `setup` builds .venv once.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
EXTRAS := dev,table,onnx,test-stock,kernels
WORKERS ?= 2
TORCH ?= newest
# One thread per test process: small matrices gain nothing from more, and the workers do not fight over cores.
SINGLE := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1

.PHONY: help setup demo test test-full test-torch test-install test-kernels lint format bench study-tabular study-tabular-search audit audit-quick docs dist clean

help:
	@echo "make setup          build $(VENV) with weightclip, its studies and everything their tests need"
	@echo "make demo           train a private model on the bundled Adult data; prints accuracy, epsilon and the certificate"
	@echo "make test           lint, then the whole test suite"
	@echo "make test-full      the suite with its long tests, and the two below for minimum and newest: results/tests/full.log"
	@echo "make test-torch     the core tests with another torch, in .venv-torch-x.y: TORCH=x.y, minimum or newest"
	@echo "make test-install   the wheel in an empty environment, outside the checkout: TORCH=x.y, minimum or newest"
	@echo "make test-kernels   the CUDA kernels in the interpreter of Triton"
	@echo "make lint           ruff check, ruff format --check, pyright"
	@echo "make format         let ruff rewrite the files"
	@echo "make bench          time and memory against plain training and DP-SGD"
	@echo "make study-tabular  the paper's tabular tables and figures (QUICK=1 for a short run)"
	@echo "make study-tabular-search  the search behind its settings (resumable)"
	@echo "make audit          try to refute the claimed epsilon, and the audits themselves by deliberate bugs"
	@echo "make audit-quick    the same claims in a few minutes"
	@echo "make docs           the documentation as HTML in docs/_build/html, its links checked"
	@echo "make dist           source archive and wheel, in dist/"
	@echo "make clean          remove $(VENV), .venv-torch-* and caches"

setup: $(STAMP)

$(STAMP): pyproject.toml studies/pyproject.toml requirements-dev.txt
	@echo "building $(VENV) (a few minutes the first time)"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -qq -r requirements-dev.txt
	$(BIN)/python -m pip install -qq -r requirements-dev.txt -e ".[$(EXTRAS)]" -e studies
	@touch $(STAMP)

demo: setup
	$(BIN)/python examples/demo.py

test: lint
	$(SINGLE) $(BIN)/python -m pytest -n $(WORKERS)

test-full:
	$(PYTHON) tools/test_full.py

test-torch:
	$(PYTHON) tools/test_torch.py $(TORCH)

test-install:
	$(PYTHON) tools/fresh_install.py $(TORCH)

test-kernels: setup
	$(SINGLE) TRITON_INTERPRET=1 $(BIN)/python -m pytest -q tests/factors/kernels tests/mutants/test_tile_mutants.py tests/mutants/test_product_mutants.py

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup
	$(BIN)/weightclip-study bench

study-tabular: setup
	$(SINGLE) $(BIN)/weightclip-study reproduce tables $(if $(QUICK),--quick)
	$(SINGLE) $(BIN)/weightclip-study reproduce bias $(if $(QUICK),--quick)
	$(SINGLE) $(BIN)/weightclip-study reproduce report $(if $(QUICK),--quick)

study-tabular-search: setup
	$(SINGLE) $(BIN)/weightclip-study reproduce search $(if $(QUICK),--quick)

audit: setup
	$(SINGLE) $(BIN)/weightclip-study audit --out results/audit
	$(SINGLE) WEIGHTCLIP_AUDIT_TABLE=results/audit $(BIN)/python -m pytest -q tests/mutants/test_audit_mutants.py

audit-quick: setup
	$(SINGLE) $(BIN)/weightclip-study audit --quick

docs: setup
	$(BIN)/python -m pip install --quiet -e ".[docs]"
	rm -rf docs/_build/html
	$(BIN)/python -m sphinx -W --keep-going -b html docs docs/_build/html
	$(BIN)/python tools/check_links.py docs/_build/html

dist: setup
	$(BIN)/python tools/dist.py

clean:
	rm -rf $(VENV) .venv-torch-* build dist src/*.egg-info studies/src/*.egg-info .pytest_cache .ruff_cache .hypothesis docs/_build
