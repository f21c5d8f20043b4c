# Two commands: `make demo` runs the main job on real data, `make test` runs every test. Both make .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test lint bench monitor acceptance-npu kernels clean

demo: $(VENV)/installed
	$(BIN)/npu-gr --log-level WARNING demo

test: $(VENV)/installed
	$(BIN)/python -m pytest -q -n 2

lint: $(VENV)/installed
	$(BIN)/ruff check npu_gr tests
	$(BIN)/ruff format --check npu_gr tests
	$(BIN)/mypy
	$(BIN)/lint-imports

# the demo's service under replay, Prometheus (Debian: apt-get install prometheus), the dashboards to open
monitor: $(VENV)/installed
	$(BIN)/npu-gr --log-level WARNING monitor

bench: $(VENV)/installed
	$(BIN)/npu-gr bench rank

# on a machine with an Ascend NPU, CANN's set_env.sh sourced and torch_npu beside torch: parity, then a latency table
acceptance-npu:
	$(PYTHON) -m npu_gr doctor --backend npu --acceptance
	TORCH_DEVICE_BACKEND_AUTOLOAD=0 $(PYTHON) -m pytest -q -m npu tests

# the Triton kernels without a device: interpreted against the reference, compiled for sm_90, lowered for Ascend 910B;
# the compilers (500 MB) stay under build/, and what cannot be had is skipped in words
kernels: $(VENV)/installed
	-test -d build/triton || $(BIN)/pip install --quiet --no-deps --only-binary :all: --target build/triton "triton>=3.6"
	PYTHONPATH=build/triton $(BIN)/python -m pytest -q -m "triton or triton_ascend" tests/backend/triton

# MovieLens-100K comes inside the public package `recbole` (2 MB); nothing of that package is imported.
$(VENV)/installed: pyproject.toml setup.py $(wildcard ops/cpu/*)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --editable ".[dev]"
	$(BIN)/pip install --quiet --no-deps recbole==1.2.1
	touch $@

clean:
	rm -rf $(VENV) .demo build *.egg-info
