PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
# Arguments of the demonstration, such as --seed 1; none: seed 0.
DEMO ?=
PYTEST_ARGS ?=
# beartype checks every signature of the package while tests run, which costs a third to a half of their time. The
# numeric tower lets an int stand where a float is asked for.
TYPED := '--jaxtyping-packages=hyperpush,hyperpush_papers,type_checks.check'

.PHONY: setup demo test test-long lint docs format clean

setup: $(STAMP)

$(STAMP): pyproject.toml papers/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "hyperpush needs Python 3.11 or newer; set PYTHON=...")'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[all,dev,docs]' -e ./papers
	touch $@

demo: $(STAMP)
	$(BIN)/python examples/hospitals.py $(DEMO)

# A file stays with one worker: its fixtures and compiled programs are made once.
test: $(STAMP)
	$(BIN)/python -m pytest -n 2 --dist loadfile $(PYTEST_ARGS)

# Every test, with run-time type checks. Peers under faults come one after the other: they start many processes.
test-long: $(STAMP)
	$(BIN)/python -m pytest -m 'not faults' -n 2 --dist loadfile $(TYPED) $(PYTEST_ARGS)
	$(BIN)/python -m pytest -m faults -n 0 $(TYPED) $(PYTEST_ARGS)

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports
	$(BIN)/pyright

# The site, in docs/_build/html. Warnings are errors; nothing is loaded from the network.
docs: $(STAMP)
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -q -W --keep-going docs docs/_build/html

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf .venv .pytest_cache .ruff_cache .import_linter_cache .hypothesis build dist docs/_build docs/reference docs/results/papers.md
	find src papers benchmarks tests docs -name __pycache__ -type d -prune -exec rm -rf {} +
