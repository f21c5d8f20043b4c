# Two commands: `make demo` runs the main job on real data, `make test` runs every test. Both make .venv first.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Where pip gets torch, e.g. https://download.pytorch.org/whl/cpu for the CPU build; empty = pip's own index
TORCH_INDEX ?=
TORCH := torch>=2.6,<2.14
unexport PYTHONDONTWRITEBYTECODE # some containers set it; hundreds of processes would each compile all that they import

CODE := npu_gr benchmarks tests ops setup.py dashboards docs .ci/check_files
WORDS := $(CODE) docs README.md CHANGELOG.md CONTRIBUTING.md SECURITY.md configs deploy Makefile pyproject.toml .ci .github

.PHONY: docs demo test suite scenes torch lint format ruff types words native files security images lock proto sbom packages ray bench monitor can-monitor acceptance-cuda acceptance-npu acceptance-cpu kernels clean

demo: $(VENV)/serves
	$(BIN)/npu-gr --log-level WARNING demo $(if $(QUICK),--quick)

test:
	@$(MAKE) --no-print-directory suite
	@$(MAKE) --no-print-directory scenes

# worksteal: each process begins with neighbours, so what a file's tests share is made about once;
# tests.again: up to three tests that fail are run once more, alone, and named at the end
suite: $(VENV)/installed
	$(BIN)/python -m pytest -q -p tests.again -n 4 --dist worksteal --ignore tests/chaos

# alone, because what these scenes measure would be the other tests
scenes: $(VENV)/installed
	$(BIN)/python -m pytest -q -p tests.again tests/chaos

# the documentation as a site, in build/site; a link that leads nowhere fails
docs: $(VENV)/installed
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python -m pytest -q -m notebooks tests/test_notebooks.py

# everything that needs no run of the code; each part is a target of its own, and a hook of .pre-commit-config.yaml
lint: ruff types words native files security images

ruff: $(VENV)/installed
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff format --check $(CODE)

types: $(VENV)/installed
	$(BIN)/mypy npu_gr benchmarks tests ops setup.py
	$(BIN)/lint-imports

words: $(VENV)/installed
	$(BIN)/codespell -q 3 $(WORDS)

# the C and C++ sources; clang-format is in the dev extra, and a machine without it skips this in words
native: $(VENV)/installed
	@if [ -x $(BIN)/clang-format ]; then \
	  find ops tests npu_gr benchmarks -name '*.h' -o -name '*.c' -o -name '*.cpp' | xargs $(BIN)/clang-format --dry-run -Werror; \
	else echo "clang-format is not installed: the format of C and C++ was not checked"; fi

files: $(VENV)/installed
	$(BIN)/python .ci/check_files

# the image, without a builder
images: $(VENV)/installed
	$(BIN)/hadolint deploy/Dockerfile

# ruff's S rules again, by the tool that they come from; what is minor there is in ruff's alone
security: $(VENV)/installed
	$(BIN)/bandit -q -ll -c pyproject.toml -r npu_gr ops setup.py

# The image's dependencies with the hashes of their files; needs the package index. With every extra that a configuration can
# switch on, and consume's; without serve, npu and triton: torch is the base image's, another one for each device. Afterwards,
# with the network: pip-audit -r deploy/requirements.lock --disable-pip
lock: $(VENV)/installed
	$(LOCK) $(IMAGE_EXTRAS:%=--extra %) pyproject.toml --output-file deploy/requirements.lock
	$(LOCK) deploy/requirements-build.in --output-file deploy/requirements-build.lock
IMAGE_EXTRAS = faiss grpc kafka otel parquet picker redis zstd
LOCK = $(BIN)/uv pip compile --quiet --upgrade --generate-hashes --no-emit-index-url --custom-compile-command "make lock" \
  --python-version 3.11 --python-platform linux --only-binary :all:

# The messages of the endpoint picker, by the oldest protoc whose output the extra `picker` allows, and of the instance's gRPC.
proto: $(VENV)/installed
	$(BIN)/uv tool run --from grpcio-tools==1.74.0 python -m grpc_tools.protoc -I. --python_out=. --pyi_out=. \
	  npu_gr/route/external_processor.proto
	cd npu_gr/server/grpc/protos && $(BIN)/python -m grpc_tools.protoc -I. --descriptor_set_out=compiled.binpb health.proto inference.proto

# what is in the image, as CycloneDX: build/sbom.json
sbom: $(VENV)/installed
	mkdir -p build
	$(BIN)/cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible --output-file build/sbom.json \
	  deploy/requirements.lock

# The wheel in an empty environment, the image, and programs of others against what we serve: from the package index, and as
# root with buildah and debootstrap; what a machine lacks is skipped in words. About 10 minutes. Mooncake (140 MB) stays under
# build/, and needs Debian's libibverbs1
packages: $(VENV)/installed
	test -d build/mooncake || $(BIN)/pip install --quiet --no-deps --only-binary :all: --target build/mooncake "mooncake-transfer-engine-non-cuda>=0.3.13"
	PYTHONPATH=build/mooncake $(BIN)/python -m pytest -q tests/engine/kv_cache/test_mooncake.py
	$(BIN)/python -m pytest -q -m "image or not image" tests/deploy
	@$(MAKE) --no-print-directory ray
	$(BIN)/python -m pytest -q -m bare tests/deploy tests/server/grpc tests/server/test_otlp.py tests/test_bare_install.py

# a real Ray, in an environment of its own that sees the packages of .venv
ray: $(VENV)/installed
	test -d build/ray || { $(PYTHON) -m venv build/ray && $(BIN)/python -c "import sysconfig as s; \
	  print(s.get_path('purelib'))" > build/ray.pth && mv build/ray.pth build/ray/lib/python3.*/site-packages && \
	  build/ray/bin/pip install --quiet "ray[data,serve]>=2.60"; }
	build/ray/bin/python -m pytest -q -m ray tests/dataset/test_on_ray.py tests/route/test_ray_serve.py tests/train/test_on_ray_train.py

# what a machine can mend of the above
format: $(VENV)/installed
	$(BIN)/ruff check --fix-only --quiet $(CODE)
	$(BIN)/ruff format $(CODE)
	@if [ -x $(BIN)/clang-format ]; then find ops tests npu_gr benchmarks -name '*.h' -o -name '*.c' -o -name '*.cpp' | xargs $(BIN)/clang-format -i; fi

# the demo's service under replay, Prometheus (Debian: apt-get install prometheus), the dashboards to open
monitor: can-monitor $(VENV)/serves
	$(BIN)/npu-gr --log-level WARNING demo --monitor

# all that monitor lacks, in one message, before anything is installed or trained; with Grafana alone missing it goes on
can-monitor:
	@lacks=; \
	command -v prometheus > /dev/null || lacks="$$lacks  the program prometheus: apt-get install prometheus\n"; \
	if $(PYTHON) -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' 2> /dev/null; then \
	  for port in 8080 8081 9090; do \
	    $(PYTHON) -c "import socket; socket.create_server(('127.0.0.1', $$port))" 2> /dev/null \
	      || lacks="$$lacks  port $$port, which is in use: npu-gr demo --help names the options\n"; \
	  done; \
	else lacks="$$lacks  Python 3.11 or newer with venv: apt-get install python3 python3-venv, or PYTHON=...\n"; fi; \
	for shows in grafana-server grafana docker podman; do ! command -v $$shows > /dev/null || has_grafana=1; done; \
	[ "$$has_grafana" ] || printf '%s\n' "no Grafana and no Docker: the dashboards are written all the same, to be" \
	  "  imported into a Grafana of yours; apt-get install docker.io, and monitor says what to type then"; \
	[ -z "$$lacks" ] || { printf "make monitor lacks\n$$lacks"; exit 1; }

bench: $(VENV)/installed
	$(BIN)/python -m benchmarks rank

# Ten minutes on a machine with the device: parity, a served process, tests, baselines, a profile; the table and the
# bundle are useful if it is cut off. WHEELS=FOLDER has what the machine lacks (python ops/acceptance.py cuda --list).
# An NPU also needs CANN's set_env.sh sourced, torch_npu beside torch, and the operators built (docs/ascend.md)
ACCEPT = $(PYTHON) ops/acceptance.py $(1) --out npu_gr-acceptance-$(1) $(if $(WHEELS),--wheels $(WHEELS))
acceptance-cuda:
	$(call ACCEPT,cuda)
acceptance-npu:
	$(call ACCEPT,npu)
acceptance-cpu:
	$(call ACCEPT,cpu) --quick

# the Triton kernels without a device: interpreted against the reference, compiled for sm_90, lowered for Ascend 910B;
# the compilers (500 MB) stay under build/, and what cannot be had is skipped in words
kernels: $(VENV)/installed
	-test -d build/triton || $(BIN)/pip install --quiet --no-deps --only-binary :all: --target build/triton "triton>=3.6"
	PYTHONPATH=build/triton $(BIN)/python -m pytest -q -m "triton or triton_ascend or mutants" tests/backend/triton tests/ops/test_mutate.py

EXTRAS := serve,parquet,plot
# What the demo needs. MovieLens-100K comes inside the public package `recbole` (2 MB); nothing of that package is imported.
$(VENV)/serves: pyproject.toml setup.py $(wildcard ops/cpu/*)
	$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -c "import torch" 2> /dev/null || $(MAKE) --no-print-directory torch
	@echo "Installing npu_gr, pyarrow, DuckDB and matplotlib into $(VENV), and compiling the CPU kernels: 1 to 3 minutes"
	$(BIN)/pip install --quiet --no-compile --editable ".[$(EXTRAS)]"
	$(BIN)/pip install --quiet --no-compile --no-deps recbole==1.2.1
	echo $(EXTRAS) > $@

torch:
ifeq ($(strip $(TORCH_INDEX)),)
	@printf '%s\n' "Installing torch into $(VENV) from pip's index. On Linux the public index has the CUDA build: several GB to download," \
	  "and more on disk. The CPU build has 0.2 GB, 0.8 GB on disk: press Ctrl-C now and type" \
	  "  make demo TORCH_INDEX=https://download.pytorch.org/whl/cpu"
	@[ ! -t 0 ] || sleep 10
	$(BIN)/pip install --quiet --no-compile "$(TORCH)"
else
	@echo "Installing torch into $(VENV) from $(TORCH_INDEX)"
	$(BIN)/pip install --quiet --no-compile --index-url "$(TORCH_INDEX)" "$(TORCH)"
endif

# And what the tests and linters need. Where nothing is installed yet, all of it is at once: each installation compiles the
# kernels, a minute. Python compiles what is imported, and pip would compile all (--no-compile).
$(VENV)/installed: EXTRAS := $(EXTRAS),dev
$(VENV)/installed: $(VENV)/serves
	@echo "The tests and linters need another 1 GB in $(VENV)"
	grep -q dev $< || $(BIN)/pip install --quiet --no-compile --editable ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .demo build *.egg-info
