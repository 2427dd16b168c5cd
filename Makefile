PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BASE := $(VENV)/.installed-base
DEV := $(VENV)/.installed-dev
DOCS := $(VENV)/.installed-docs
BENCH := $(VENV)/.installed-bench
TIMM := $(VENV)/.installed-timm
TITAN := $(VENV)/.installed-titan
TRL := $(VENV)/.installed-trl
ZOO := $(VENV)/.installed-zoo
INPUTS := pyproject.toml constraints.txt
PIP_INSTALL = $(BIN)/python -m pip install --disable-pip-version-check -q -c constraints.txt

.DELETE_ON_ERROR:
.PHONY: demo test lint browser compiler bench zoo zoo-table titan titan-evidence trl isa ops evidence compat docs wheel clean

DEMO = llama3-8b --target h100-sxm --ranks 8 --batch 2 --seq 8192 --budget 60GiB

demo: $(BASE)
	@mkdir -p demo
	$(BIN)/memfit plan $(DEMO) --curve -o demo/plan.json --html demo/report.html
	@echo "the page: $(CURDIR)/demo/report.html"

test: lint browser compiler
	$(BIN)/python -m pytest

lint: $(DEV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyrefly check
	$(BIN)/lint-imports

# The report's page is tested in a real browser. Without the rights to install one, these tests are left out.
browser:
	@command -v chromium >/dev/null 2>&1 || { \
		echo "installing chromium for the tests of the page ..."; \
		as=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
		$$as apt-get update -q >/dev/null && $$as apt-get install -y -q chromium >/dev/null; \
	} || echo "chromium could not be installed"

# Inductor's CPU kernels are C++. Without a compiler, and the rights to install one, tests of compiled models are skipped.
compiler:
	@command -v g++ >/dev/null 2>&1 || { \
		echo "installing g++ for the tests of compiled models ..."; \
		as=$$([ "$$(id -u)" = 0 ] || echo sudo -n); \
		$$as apt-get update -q >/dev/null && $$as apt-get install -y -q g++ >/dev/null; \
	} || echo "g++ could not be installed"

bench: $(DEV) $(BENCH)
	@set -e; for file in benchmarks/*.py; do \
		[ -e "$$file" ] || continue; \
		echo "== $$file"; \
		$(BIN)/python "$$file"; \
	done

# All models of the table, then the tests that are too long for CI.
zoo: zoo-table
	$(BIN)/python -m pytest tests/zoo tests/integrations tests/distributed -m zoo

# Every model of four libraries that one generic maker can build, written to docs/zoo.md: about an hour on two cores.
zoo-table: $(DEV) $(ZOO)
	HF_HUB_OFFLINE=1 PYTHONPATH=src:. $(BIN)/python -m tests.zoo.catalogue --write

# torchtitan's own code, captured and on two real ranks: about 1 GB to install, and some minutes.
titan: $(DEV) $(TITAN)
	$(BIN)/python -m pytest tests/integrations/test_torchtitan.py tests/distributed/test_torchtitan_plans.py \
		tests/evidence/test_titan.py -m zoo

titan-evidence: $(DEV) $(TITAN)
	PYTHONPATH=src:. $(BIN)/python -m tests.evidence.titan --write docs/evidence.md

# TRL's trainers, which inherit from transformers'.
trl: $(DEV) $(TRL)
	$(BIN)/python -m pytest tests/integrations/test_trl.py -m zoo

# The tests that compare with this machine's CPU kernels, under older instruction sets and other numbers of threads.
isa: $(DEV)
	$(BIN)/python tests/capture/instruction_sets.py $(ISA)

# Sweeps PyTorch's OpInfo database: which kernels are captured to the byte, and docs/ops.md. About half an hour on two cores.
ops: $(DEV)
	PYTHONPATH=src $(BIN)/python -m tests.zoo.op_sweep

# Predictions beside published measurements, written to docs/evidence.md. Speeds: kernels (all of them where
# MEMFIT_EVIDENCE or ../shared/evidence has them) and a sample of whole steps, or all of these with STEPS=all. Memory:
# snapshots, whole steps, and runs on one GPU, of timm's models a sample with RUNS=few. All whole steps take half an hour.
STEPS = few
RUNS = all
evidence: $(DEV) $(TIMM)
	PYTHONPATH=src:. $(BIN)/python -m tests.evidence.speeds --steps $(STEPS) --write docs/evidence.md
	PYTHONPATH=src:. $(BIN)/python -m tests.evidence.memory --runs $(RUNS) --write docs/evidence.md
	PYTHONPATH=src:. $(BIN)/python -m tests.evidence.fits

# Every minor release of torch in a virtualenv of its own: about 6 GB and 5 minutes each.
compat: $(BASE)
	$(BIN)/python tests/torch_versions/versions.py $(VERSIONS)

# Pages run `memfit` while the site is built. The theme, mkdocs-material 9, is maintained until May 2027 and says so at
# every start, unless told not to.
docs: compiler $(DOCS)
	PATH="$(CURDIR)/$(BIN):$$PATH" COLUMNS=100 TORCH_CPP_LOG_LEVEL=ERROR NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python tests/docs/built_site.py site

# The wheel and the sdist, and the wheel in an empty virtualenv outside of the repository: installs torch once more.
wheel: $(DEV)
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/python tests/packaging/empty_environment.py dist/*.whl

clean:
	rm -rf $(VENV) .compat site build dist .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# An editable install has no bytecode, and where PYTHONDONTWRITEBYTECODE is set it never gets any: a third of a second
# in every command.
COMPILE = $(BIN)/python -m compileall -q src

# A stamp is written only after its install has succeeded. A virtualenv without pip counts as none.
ENSURE_VENV = $(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)

$(BASE): $(INPUTS)
	@echo "installing memfit into $(VENV), about a minute ..."
	$(ENSURE_VENV)
	$(PIP_INSTALL) -e .
	$(COMPILE)
	touch $@

$(DEV): $(INPUTS)
	@echo "installing memfit and its development tools into $(VENV), about two minutes ..."
	$(ENSURE_VENV)
	$(PIP_INSTALL) -e '.[dev,zoo]'
	$(COMPILE)
	touch $@ $(BASE)

$(BENCH): $(DEV)
	$(PIP_INSTALL) -e '.[bench]'
	touch $@

# Without torchvision, whose wheel cannot be loaded beside a CPU build of torch: tests/evidence/timm_models.py.
$(TIMM): $(DEV)
	$(PIP_INSTALL) --no-deps 'timm>=1.0.20,<2'
	touch $@

# In a folder of their own: transformers and diffusers would load a torchvision that they see, which needs a CUDA torch.
$(ZOO): $(DEV)
	$(PIP_INSTALL) --no-deps --upgrade --target $(VENV)/zoo 'timm>=1.0.20,<2' 'torchvision>=0.28'
	touch $@

# Without what these ask for: datasets wants an older huggingface_hub than transformers does, and none of it is used here.
TITAN_NEEDS = torchtitan torchdata datasets pandas pyarrow dill multiprocess xxhash python-dateutil six pytz tzdata \
	tensorboard absl-py protobuf einops httpx 'triton>=3.6'

$(TITAN): $(DEV)
	@echo "installing torchtitan into $(VENV), about 1 GB ..."
	$(PIP_INSTALL) --no-deps $(TITAN_NEEDS)
	touch $@

# For the same reason.
TRL_NEEDS = trl datasets pandas pyarrow 'dill<0.5' multiprocess xxhash python-dateutil six pytz tzdata httpx httpcore

$(TRL): $(DEV)
	$(PIP_INSTALL) --no-deps $(TRL_NEEDS)
	touch $@

# How-to pages train with the libraries of `zoo`.
$(DOCS): $(INPUTS)
	@echo "installing memfit and what builds its documentation into $(VENV), about two minutes ..."
	$(ENSURE_VENV)
	$(PIP_INSTALL) -e '.[docs,zoo]'
	touch $@ $(BASE)
