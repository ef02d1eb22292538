# Both commands do all of their own set-up in .venv; a stamp per extra keeps later calls from installing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What one environment cannot hold together: three more engines, each tested in its own, and a second MPI.
# MXNet needs a numpy that there is for Python 3.11 and older only.
ENGINES := tensorflow jax $(shell $(PYTHON) -c 'import sys; print("mxnet" if sys.version_info < (3, 12) else "")')
ENVIRONMENTS := openmpi $(ENGINES)
# Twice as many as there are cores, since tests wait for much of their time: for ranks, for timeouts, for what does not come.
PYTEST := -m pytest -n $(shell expr 2 \* $$(nproc)) --dist loadfile --no-loadscope-reorder

.PHONY: demo check docs dist environments test gpu ray clean
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
dist: $(VENV)/.installed-dist
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/twine check --strict dist/*

environments: $(ENVIRONMENTS:%=.venv-%/.installed)

# Installs go side by side: pip keeps one core busy, much of the time by compiling to bytecode.
# Tests start hundreds of processes. Where Python may not keep what it compiles (PYTHONDONTWRITEBYTECODE), each of them would
# compile what it imports.
test:
	$(MAKE) --no-print-directory --jobs=$(shell nproc) check environments
	rm -rf runs/engines
	$(BIN)/python -m compileall -q -j 0 bench commsched tests
	$(BIN)/python $(PYTEST)
	set -e; for engine in $(ENGINES); do \
	  .venv-$$engine/bin/python $(PYTEST) tests/plugins/$$engine tests/examples/test_engines.py -k $$engine; \
	done
	$(BIN)/python -m tests.examples.engine_table --check

# With the packages that are there, of whatever version. Its exit code is 2 if nothing ran.
gpu:
	$(PYTHON) -m tests.gpu

# The plugin of Ray Train, on a cluster of several raylets on this machine. Its environment alone takes more than a minute.
ray: .venv-ray/.installed
	.venv-ray/bin/python -m pytest tests/plugins/test_ray_cluster.py

clean:
	rm -rf $(VENV) $(ENVIRONMENTS:%=.venv-%) .venv-ray

$(VENV)/.installed-%: pyproject.toml constraints-dev.txt $(VENV)/.created
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[$*]"
	@touch $@

$(ENVIRONMENTS:%=.venv-%/.installed) .venv-ray/.installed: .venv-%/.installed: pyproject.toml constraints-dev.txt environments/%.txt .venv-%/.created
	.venv-$*/bin/python -m pip install --quiet -r environments/$*.txt
	@touch $@

$(VENV)/.created $(ENVIRONMENTS:%=.venv-%/.created) .venv-ray/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "commsched needs Python 3.11 or newer; try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(@D)
	@touch $@
