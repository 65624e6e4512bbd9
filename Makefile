# Two commands for a newcomer: make demo, make test. Everything runs in .venv, made from constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/ready
SITE := .venv/docs
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt

.PHONY: demo test test-all fuzz check format bench bench-lens bench-causes docs clean

demo: $(READY)  ## run the main job on what ships
	@mkdir -p build
	$(BIN)/keyquery look --html build/demo.html --force

# A file is one process's, so that what its tests share is made once; what is compiled is kept for the next process.
test: $(READY)  ## the fast tests
	PYTHONDONTWRITEBYTECODE= $(BIN)/pytest -q -n auto --dist loadfile --no-loadscope-reorder -m "not slow"

test-all: $(READY)  ## every test, and ten times the examples of each property
	$(BIN)/pytest -q -n auto --hypothesis-profile thorough

fuzz: $(READY)  ## every reader on changed files, 100,000 times; CASES=, SEED=
	$(BIN)/python -m tests.fuzz.run --cases $(or $(CASES),100000) --seed $(or $(SEED),0)

check: $(READY)  ## format, lint, types, tests
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(MAKE) test

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(READY)  ## every figure of docs/measured.md and of other pages, measured again
	$(BIN)/python bench/forms.py
	$(BIN)/python bench/kernels.py
	$(BIN)/python bench/look.py
	$(BIN)/python bench/structured.py
	$(BIN)/python bench/dial.py
	$(BIN)/python bench/primal.py
	$(BIN)/python bench/survey.py

bench-lens: $(READY)  ## look against TransformerLens, in an environment of its own
	$(PYTHON) -m venv .lens
	.lens/bin/pip install --quiet --disable-pip-version-check -c constraints.txt hatchling
	.lens/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation '.[lens]'
	$(BIN)/python bench/look.py --lens .lens/bin/python

bench-causes: $(READY)  ## causes against causal-learn, in an environment of its own
	$(PYTHON) -m venv .fci
	.fci/bin/pip install --quiet --disable-pip-version-check -c constraints.txt hatchling
	.fci/bin/pip install --quiet --disable-pip-version-check -c constraints.txt --no-build-isolation '.[fci]'
	.fci/bin/python bench/causes.py

docs: $(SITE)  ## docs/ to build/docs: figures drawn anew, the reference, notebooks run
	for figure in docs/figures/*.py; do $(BIN)/python $$figure || exit 1; done
	$(BIN)/mkdocs build --strict --quiet
	@echo "open build/docs/index.html"

clean:
	rm -rf .venv .lens .fci build dist

$(READY): pyproject.toml studies/pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 11) else "keyquery needs Python 3.11 or newer, not " + sys.version.split()[0] + "; try: make PYTHON=python3.12 ...")'
	$(PYTHON) -m venv .venv
	$(INSTALL) hatchling editables
	$(INSTALL) --no-build-isolation -e '.[dev]'
	$(INSTALL) --no-build-isolation -e ./studies
	touch $@

$(SITE): $(READY)
	$(INSTALL) --no-build-isolation -e '.[docs]'
	touch $@
