# Thin: each target is the command that one would type. A second torch: make second.
VENV ?= .venv
FRAMEWORKS = $(VENV)-frameworks
# Not torch 2.15.0 and torchvision 0.29.2: the configuration of pip on CI's machines allows these versions and no newer ones.
TORCH ?= torch==2.14.1
ZOO ?= torchvision==0.29.1 -r requirements-zoo.txt
NEXT = torch==2.15.0
PYTHON ?= python3
RUN = $(VENV)/bin
SOURCES = setup.py pyproject.toml $(shell find csrc -type f)
# For the CPU alone where no GPU is visible; QTOOLKIT_CUDA=1 compiles for CUDA too. A stamp for each, of which the last one is kept.
BUILT = $(VENV)/built-$(or $(QTOOLKIT_CUDA),auto)
# A process for each core, of one thread each. Tests take from a millisecond to ten seconds: idle processes take over.
TESTS = OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive $(RUN)/python -m pytest --numprocesses auto --dist worksteal

# The second torch: a copy of the tree, with an environment of its own. Its tests are those whose results torch has a part in.
SECOND = $(MAKE) -C build/second TORCH=torch==2.13.0 ZOO= QTOOLKIT_CUDA=0
WITHOUT_TORCH = $(addprefix --ignore-glob=tests/, cli debug/test_report_in_a_browser.py ops/test_cuda_* ops/test_instruction_sets.py \
  $(addsuffix .py, $(addprefix test_, benchmarks pytest_benchmarks examples house notebooks readme site site_in_a_browser sweep wheel)))

.PHONY: demo test test-all rows reached lint unit docs build wheel environments frameworks second second-environment next sanitize fuzz browser emulator clean \
  gpu gpu-build gpu-test gpu-sanitize gpu-bench tensorrt

demo: $(BUILT)               ## from a float CNN to verified int8 and int4 ONNX models, on digits
	@echo "== examples/digits.py"
	$(RUN)/python examples/digits.py

test: $(BUILT) $(VENV)/ready ## lints, the documentation, and of every test one case, without those that are slow
	$(MAKE) --jobs 2 --output-sync=target lint docs
	$(MAKE) unit OPTIONS='--few -m "not slow"'
	$(MAKE) rows OPTIONS='-m "not slow"'

# Tests on both torches. What has passed is noted, so that CI knows from where a change can reach tests (tests/reach.py).
test-all: lint docs rows $(BUILT) $(VENV)/ready second-environment ## every case of every test, before a release and at the end of a piece of work
	@echo "== all tests, with the sweeps in full"
	$(TESTS) --sweep
	$(MAKE) frameworks OPTIONS=--sweep
	$(SECOND) unit OPTIONS='--few -m "not data" $(WITHOUT_TORCH)'
	git diff --quiet HEAD && git rev-parse HEAD >.ci/verified && echo "== all tests have passed: commit .ci/verified"

rows: $(BUILT) $(VENV)/ready ## each row of pytest benchmarks once, without times
	@echo "== rows of pytest benchmarks"
	$(TESTS) --dist loadfile benchmarks --benchmark-disable $(OPTIONS)

reached: $(BUILT) $(VENV)/ready ## what the change since the commit BASE can reach, without what make test runs
	@paths=$$($(RUN)/python -m tests.reach $(BASE)) && echo "== tests that the change since '$(BASE)' reaches: $${paths:-none}" && \
	  if [ -n "$$paths" ]; then $(TESTS) --rest $(OPTIONS) $$paths || [ $$? -eq 5 ]; fi

frameworks: $(FRAMEWORKS)/ready ## the tests of qtoolkit.integrations, in an environment that has their packages too
	@echo "== tests of integrations"
	PYTHONPATH=$(CURDIR) OMP_NUM_THREADS=1 $(FRAMEWORKS)/bin/python -m pytest --numprocesses auto --dist loadfile \
	  tests/frameworks tests/test_docs.py qtoolkit/integrations $(OPTIONS)

unit: $(BUILT) $(VENV)/ready ## the tests; of exhaustive sweeps a sample that covers each value (tests/sweep.py)
	@echo "== tests"
	$(TESTS) $(OPTIONS)

lint: $(BUILT) $(VENV)/ready ## ruff, mypy --strict, clang-format
	@echo "== lints"
	$(RUN)/ruff check . && $(RUN)/ruff format --check . && $(RUN)/mypy
	find csrc tests examples -regex '.*\.\(cpp\|h\|cuh?\)' | xargs $(RUN)/clang-format --style=file:csrc/.clang-format --dry-run -Werror

docs: $(BUILT) $(VENV)/ready ## the site, in build/site; each warning is an error
	@echo "== build/site/index.html"
	NO_MKDOCS_2_WARNING=1 $(RUN)/mkdocs build --strict

environments: $(VENV)/ready second-environment ## those of both torches; with --jobs 2 beside each other, as pip takes one core

# An index of its own leaves files that have not changed as they are: nothing is installed or compiled again for them.
second-environment:
	mkdir -p build/second
	GIT_INDEX_FILE=$(CURDIR)/build/second/.index git --work-tree=build/second read-tree --reset -u $$(git write-tree)
	$(SECOND) $(VENV)/ready

second: second-environment   ## what make test runs, on the oldest torch that CI knows, without real data and what no torch changes, in a copy of the tree
	$(SECOND) unit OPTIONS='--few -m "not data and not slow" $(WITHOUT_TORCH)'

next: $(VENV)/has-torch       ## says whether pip can install the newest torch here, to which the pins can move then
	@if $(RUN)/pip install --dry-run --quiet --no-deps $(NEXT) > /dev/null 2>&1; then \
	  echo "$(NEXT) can be installed here: docs/contributing.md, Move a pin."; else echo "$(NEXT): not installable here."; fi

sanitize: $(VENV)/ready      ## the ops under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, in build/sanitize
	tests/sanitize/run address $(RUN)/python
	tests/sanitize/run thread $(RUN)/python

# On a machine with a GPU, by its own Python, with what docs/gpu.md names. Each piece takes at most ten minutes.
GPU_PYTHON ?= python3
gpu: gpu-build gpu-test gpu-sanitize gpu-bench ## the first hour on a GPU: build, tests, compute-sanitizer, benchmarks

gpu-build:                   ## compile for the card found, in place; without a card, for data-centre GPUs
	QTOOLKIT_CUDA=1 $(GPU_PYTHON) setup.py build_ext --inplace

gpu-test:                    ## ops and training steps on CUDA against the CPU, and the same kernels on the host
	$(GPU_PYTHON) -m pytest -q -rs -p no:cacheprovider -W ignore --sweep tests/ops/test_cuda.py tests/ops/test_cuda_values.py
	$(GPU_PYTHON) -m pytest -q -rs -p no:cacheprovider -W ignore tests/training/test_cuda.py tests/integer/test_sums_on_cuda.py

gpu-sanitize:                ## a call of every op under compute-sanitizer's four tools
	for tool in memcheck racecheck initcheck synccheck; do \
	  PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool $$tool --error-exitcode 1 $(GPU_PYTHON) -m pytest -q -p no:cacheprovider -W ignore \
	    tests/ops/test_cuda_values.py tests/ops/test_cuda.py \
	    -k "(gpu and (every_op or batch_norm or max_pool or weight)) or attention_is" || exit 1; done

gpu-bench:                   ## ops beside a copy of the same bytes, training steps beside float; writes docs/gpu.md
	$(GPU_PYTHON) -m benchmarks.pages.gpu all --write

tensorrt:                    ## engines of TensorRT 11: int8 beside float16, layers and values beside PyTorch's; writes docs/tensorrt.md
	$(GPU_PYTHON) -m benchmarks.pages.tensorrt --write

browser:                     ## the browser that tests open reports in, on Debian, as root; without it they are skipped
	apt-get update && apt-get install --yes --no-install-recommends chromium fonts-liberation

emulator:                    ## an emulated processor without VNNI, on which tests run files, on Debian, as root; without it they run on this one alone
	apt-get update && apt-get install --yes --no-install-recommends qemu-user

fuzz: $(BUILT) $(VENV)/ready ## a million calls of ops, and many damaged files, JSON texts and state dicts; an hour on one core
	@echo "== fuzz"
	OMP_NUM_THREADS=1 $(RUN)/python -W ignore -m tests.fuzz --calls 1000000
	FUZZ=50 OMP_NUM_THREADS=1 $(RUN)/python -m pytest -q tests/test_config.py tests/test_faults.py \
	  tests/cli/test_hostile_files.py tests/export/test_hostile_backend_files.py

build: $(BUILT)              ## compile again what has changed

# Torch's own libraries come with torch. The tag names the oldest glibc that the wheel loads with: that of this machine's compiler.
wheel: $(VENV)/ready         ## a wheel for Linux without CUDA, which installs without a compiler, in build/wheels
	QTOOLKIT_CUDA=0 $(RUN)/pip wheel --quiet --no-build-isolation --no-deps --wheel-dir build/unrepaired .
	PATH=$(abspath $(RUN)):$$PATH auditwheel repair --exclude libc10.so --exclude libtorch_cpu.so --wheel-dir build/wheels \
	  build/unrepaired/*.whl

$(BUILT): $(VENV)/has-torch $(SOURCES)
	@echo "== compile what has changed of csrc"
	$(RUN)/python setup.py --quiet build_ext --inplace
	$(RUN)/pip install --quiet --no-build-isolation --editable . -c constraints.txt
	rm -f $(VENV)/built-* && touch $@

# What builds the library and runs the demo.
$(VENV)/has-torch: constraints.txt requirements-onnx.txt
	@echo "== create $(VENV) and download $(TORCH) into it (minutes: torch is large)"
	$(PYTHON) -m venv $(VENV)
	$(RUN)/pip install --quiet $(TORCH) "setuptools>=77" ninja wheel scikit-learn rich -r requirements-onnx.txt -c constraints.txt && touch $@

$(VENV)/ready: $(VENV)/has-torch requirements-benchmarks.txt requirements-checkpoint.txt requirements-cli.txt requirements-dev.txt requirements-docs.txt requirements-litert.txt requirements-openvino.txt requirements-report.txt requirements-training.txt requirements-tuning.txt requirements-zoo.txt
	@echo "== install what tests and lints need"
	$(RUN)/pip install --quiet $(TORCH) $(ZOO) -r requirements-checkpoint.txt -r requirements-cli.txt -r requirements-dev.txt -r requirements-docs.txt -r requirements-litert.txt -r requirements-openvino.txt -r requirements-report.txt -r requirements-training.txt -r requirements-tuning.txt -c constraints.txt && touch $@

# Without dependencies: they are in $(VENV), whose packages this environment sees, but for these (an OpenCV that needs no display).
$(FRAMEWORKS)/ready: $(BUILT) $(VENV)/ready requirements-frameworks.txt constraints.txt
	$(PYTHON) -m venv $(FRAMEWORKS)
	$(RUN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' > \
	  $$($(FRAMEWORKS)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/packages.pth
	$(FRAMEWORKS)/bin/pip install --quiet --no-deps -r requirements-frameworks.txt opencv-python-headless polars polars-runtime-32 \
	  ultralytics-thop -c constraints.txt && touch $@

clean:
	rm -rf build $(VENV) $(FRAMEWORKS) qtoolkit/*.so
