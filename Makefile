# make chat | make test: the two commands of the quick start. Both install first.
#
#   make chat PROMPT="..."      answer once (the likeliest answer) and exit
#   make chat MODEL=qwen3-4b    any model reference (edgeserve models list)
#   make install BACKEND=cuda   cpu (default), cuda, metal, vulkan, rocm: a prebuilt wheel where one can be had
#   make install BACKEND=native compile for exactly this CPU

PYTHON ?= python3
VENV   ?= .venv
BACKEND ?= cpu
MODEL  ?=
PROMPT ?=
PY      = $(VENV)/bin/python
STAMP   = $(VENV)/.installed-$(BACKEND)

.PHONY: install chat test lint clean

install: $(STAMP)

$(STAMP): pyproject.toml edgeserve/install_runtime.py
	@test -x $(PY) || $(PYTHON) -m venv $(VENV)
	@rm -f $(VENV)/.installed-*
	@$(PY) edgeserve/install_runtime.py --backend $(BACKEND) $(if $(filter-out cpu,$(BACKEND)),--force)
	@echo "Installing edgeserve and its tools." >&2
	@$(PY) -m pip install -qq --editable ".[dev]"
	@touch $@

chat: install
	@$(PY) -m edgeserve chat $(MODEL) $(if $(PROMPT),--temp 0 -p "$(PROMPT)")

test: install
	@$(PY) -m pytest -n 2 --dist loadfile

lint: install
	@$(PY) -m ruff check . && $(PY) -m ruff format --check . && $(PY) -m mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
