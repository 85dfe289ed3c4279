# Every target works on a bare machine with Python 3.10 or newer: it makes its own .venv, and a second run is quick.
PYTHON ?= python3
BIN := .venv/bin
TESTS ?= tests
JOBS ?= 2

.PHONY: demo test test-all lint types bench reproduction docs clean help

help:           ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/'

# torch first and by its exact version: an open range pulls gigabytes of CUDA packages.
# curvlinops comes without its dependencies, since they bring torchvision, which nothing here uses; it does import four.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c constraints.txt "$$(grep -o '^torch==[0-9.]*' constraints.txt)"
	$(BIN)/python -m pip install -q -c constraints.txt -e '.[hf,report,studies,dev]'
	$(BIN)/python -m pip install -q -c constraints.txt --no-deps curvlinops-for-pytorch einops einconv linear_operator tqdm
	@# Triton comes with torch for a GPU; elsewhere its interpreter tests the kernels
	@$(BIN)/python -c "import triton" 2>/dev/null || $(BIN)/python -m pip install -q --no-deps triton==3.9.0 || \
		echo "Triton could not be installed: tests of the GPU's kernels are skipped"
	@touch $@

demo: .venv/ready       ## train the one-block GPT-2 on digit addition, analyse it, write out/report.html
	$(BIN)/curvlens analyze

test: .venv/ready       ## run the tests, a sample of the slow ones among them
	$(BIN)/python -m pytest -n $(JOBS) $(TESTS)

test-all: .venv/ready   ## run all tests, the slow ones too
	$(BIN)/python -m pytest -n $(JOBS) --run-slow $(TESTS)

lint: .venv/ready       ## check style
	$(BIN)/ruff check src tests examples benchmarks
	$(BIN)/ruff format --check src tests examples benchmarks

types: .venv/ready      ## check types
	$(BIN)/mypy

.venv/peers: .venv/ready
	$(BIN)/python -m pip install -q --no-deps --pre hessian-eigenthings==1.0.0a5 pyhessian==0.1
	@touch $@

bench: .venv/peers      ## measure the engines beside their peers on this machine
	$(BIN)/python benchmarks/engines.py
	$(BIN)/python benchmarks/layered.py

reproduction: .venv/ready  ## render docs/reproduction.md from the measurements beside it
	$(BIN)/python -m curvlens.studies.page

docs: .venv/ready       ## build the pages under docs/ into site/
	$(BIN)/python -m pip install -q -c constraints.txt mkdocs-material
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build -q --strict

clean:          ## remove what the targets made
	rm -rf .venv site out build
