# Nothing but Python and make is needed. The same commands are pixi tasks, and
# tests/test_packaging.py keeps the two in step.

# The interpreter that makes the virtual environment.
PYTHON ?= python3
# More arguments for demo, tests and benchmarks: make demo ARGS="--text my.txt"
ARGS ?=

BIN := .venv/bin
INSTALLED := .venv/.installed
PARITY := .venv-parity/.installed
BENCH := .venv-bench/.installed
SERVE := .venv-serve/.installed
COMMA := ,
DOCUMENTED := $(addprefix kpool_graph, .nn .reference .reference_ragged \
  .reference_indexer .serve .testing)
LINTERS := .venv/.linters
MOJO_DIRS := kernels tests/kernels benchmarks
MBLACK := $(BIN)/mblack --fast --preview -t mojo

.PHONY: help
help: ## list these targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-11s %s\n", $$1, $$2}' Makefile

.PHONY: demo
demo: $(INSTALLED) ## show the ring at work on real text
	$(BIN)/python -m kpool_graph demo $(ARGS)

.PHONY: test
test: $(INSTALLED) ## run the tests
	$(BIN)/python -m pytest $(ARGS)

.PHONY: test-slow
test-slow: $(INSTALLED) ## run the slow tests: GPU compiles, wheel, demo
	$(BIN)/python -m pytest -m slow $(ARGS)

.PHONY: test-parity
test-parity: $(PARITY) ## compare with Hugging Face transformers (installs torch)
	$(PARITY:.installed=bin)/python -m pytest tests/parity $(ARGS)

.PHONY: test-serve
test-serve: $(SERVE) ## serve a model with max serve and check its answers (installs modular)
	$(SERVE:.installed=bin)/python -m pytest tests/serve $(ARGS)

.PHONY: test-commands
test-commands: $(INSTALLED) $(LINTERS) $(PARITY) $(BENCH) $(SERVE) ## run every command that a page shows (installs all of the above)
	$(BIN)/python -m pytest tests/commands $(ARGS)

.PHONY: serve-demo
serve-demo: $(SERVE) ## serve a model, ask it two prompts, check them (installs modular)
	$(SERVE:.installed=bin)/python -m kpool_graph serve-demo $(ARGS)

.PHONY: bench
bench: $(BENCH) ## time the ops beside their peers (installs torch, jax; half an hour or so)
	$(BENCH:.installed=bin)/python -m benchmarks run $(ARGS)

.PHONY: bench-quick
bench-quick: $(BENCH) ## the same with fewer cases, in less than ten minutes
	$(BENCH:.installed=bin)/python -m benchmarks run --quick $(ARGS)

.PHONY: bench-gpu
bench-gpu: $(INSTALLED) ## pack the GPU benchmark for a machine with a GPU
	$(BIN)/python -m benchmarks.gpu.pack $(ARGS)

.PHONY: gate-gpu
gate-gpu: $(INSTALLED) ## compare the kernels' GPU code with its table
	$(BIN)/python -m benchmarks.gpu.gate $(ARGS)

.PHONY: doctor
doctor: $(INSTALLED) ## check this installation
	$(BIN)/python -m kpool_graph doctor

.PHONY: lint
lint: $(LINTERS) ## check style, types and docstrings
	mkdir -p build
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .
	$(BIN)/python -m mypy
	$(MBLACK) --check $(MOJO_DIRS)
	$(BIN)/mojo precompile --Werror --diagnose-missing-doc-strings -o build/kpool_ops.mojoc kernels

.PHONY: format
format: $(LINTERS) ## rewrite the sources in the house style
	$(BIN)/python -m ruff check --fix-only .
	$(BIN)/python -m ruff format .
	$(MBLACK) $(MOJO_DIRS)

# pdoc may run programs: max.nn compiles a module of its own at its first import. What
# it cannot resolve are types of MAX's own, in the config that ours is a kind of.
.PHONY: docs
docs: $(SERVE) ## write the API reference to build/docs (installs modular)
	PDOC_ALLOW_EXEC=1 $(SERVE:.installed=bin)/python -W ignore:Error -m pdoc --docformat google --output-directory build/docs kpool_graph $(DOCUMENTED)

.PHONY: wheel
wheel: $(INSTALLED) ## build sdist and wheel into dist/
	$(BIN)/python -m build

.PHONY: venv
venv: $(INSTALLED) ## install into .venv (PYTHON=python3.12 picks another Python)

.PHONY: clean
clean: ## remove .venv, builds and caches
	rm -rf .venv .venv-parity .venv-bench .venv-serve build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

# Makes a virtual environment with this package and some of its extras.
define install
	@command -v $(PYTHON) >/dev/null || { \
	  echo "There is no $(PYTHON) here. Install Python 3.10 to 3.14, or name one:" \
	    "make venv PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; \
	  sys.exit(0 if (3, 10) <= v <= (3, 14) else \
	  "$(PYTHON) is Python %d.%d, but MAX needs Python 3.10 to 3.14." % v + \
	  " Name another: make venv PYTHON=python3.12")'
	@echo "Making $(@D) and installing MAX into it: some minutes, once."
	test -x $(@D)/bin/pip || $(PYTHON) -m venv --clear $(@D)
	@# Old pip cannot resolve MAX.
	$(@D)/bin/python -m pip install --upgrade pip
	$(@D)/bin/python -m pip install -e '.[$(1)]'
	@touch $@
endef

$(INSTALLED): pyproject.toml
	$(call install,test)

$(PARITY): pyproject.toml
	$(call install,test$(COMMA)parity)

$(BENCH): pyproject.toml
	$(call install,bench)

$(SERVE): pyproject.toml
	$(call install,test$(COMMA)serve)

$(LINTERS): $(INSTALLED)
	@echo "Installing the linters into .venv."
	$(BIN)/python -m pip install -e '.[lint]'
	@touch $@
