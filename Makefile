# Both commands do all of their own set-up in .venv; a stamp per extra keeps later calls from installing again.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test clean
.DELETE_ON_ERROR:

demo: $(VENV)/.installed-examples
	$(BIN)/python -m bench demo

test: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python -m pytest

clean:
	rm -rf $(VENV)

$(VENV)/.installed-%: pyproject.toml constraints-dev.txt $(VENV)/.created
	$(BIN)/python -m pip install --quiet -c constraints-dev.txt -e ".[$*]"
	@touch $@

$(VENV)/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "commsched needs Python 3.11 or newer; try make PYTHON=python3.11" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	@touch $@
