# `make pretrain` on a fresh clone is all that a newcomer needs; every target sets up what it uses.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export TORCH_EXTENSIONS_DIR := $(CURDIR)/$(VENV)/torch_extensions

.PHONY: pretrain test test-gpu rehearse check setup clean

pretrain: $(VENV)/.ready
	$(BIN)/deepspeed recipes/pretrain.py

setup: $(VENV)/.ready

# Installs the pinned packages, and compiles, once, whatever DeepSpeed ops the CPU's ds_config needs.
$(VENV)/.ready: requirements.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement requirements.txt
	$(BIN)/python -m recipes.cluster.op_builds ds_configs/cpu.json
	touch $@

$(VENV)/.ready-test: $(VENV)/.ready tests/requirements.txt
	$(BIN)/pip install --quiet --requirement tests/requirements.txt
	touch $@

# Two files at a time, in the order of their names: what starts several ranks waits for them half of its time. Each
# process has one thread, since more would wait for each other on two cores.
test: $(VENV)/.ready-test
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests -n 2 --dist loadfile --no-loadscope-reorder

test-gpu: $(VENV)/.ready-test
	$(BIN)/python -m pytest tests -m gpu

# Two hosts as network namespaces, with the hostfile command, a cut link and a resume; needs root.
rehearse: $(VENV)/.ready-test
	REHEARSE=1 $(BIN)/python -m pytest tests/rehearsal -s -v

check: $(VENV)/.ready-test
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache
