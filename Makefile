# Thin: each target is the command that one would type. A second torch: make second.
VENV ?= .venv
TORCH ?= torch==2.14.1 torchvision==0.29.1 -r requirements-zoo.txt
PYTHON ?= python3
RUN = $(VENV)/bin
SOURCES = setup.py pyproject.toml $(shell find csrc -type f)

.PHONY: demo test lint unit build second sanitize clean

demo: $(VENV)/built          ## from a float CNN to verified int8 and int4 ONNX models, on digits
	$(RUN)/python examples/digits.py

test: lint unit              ## everything that CI checks on one torch

unit: $(VENV)/built          ## all tests
	$(RUN)/python -m pytest

lint: $(VENV)/built          ## ruff, mypy --strict, clang-format
	$(RUN)/ruff check . && $(RUN)/ruff format --check . && $(RUN)/mypy
	find csrc tests -regex '.*\.\(cpp\|h\|cuh?\)' | xargs $(RUN)/clang-format --style=file:csrc/.clang-format --dry-run -Werror

second:                      ## the tests on the oldest torch that CI knows, in a copy of the tree with an environment of its own
	git checkout-index --all --force --prefix=build/second/
	$(MAKE) -C build/second unit TORCH=torch==2.13.0 QTOOLKIT_CUDA=0

sanitize: $(VENV)/ready      ## the ops under AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer, in build/sanitize
	tests/sanitize/run address $(RUN)/python
	tests/sanitize/run thread $(RUN)/python

build: $(VENV)/ready         ## compile again what has changed
	$(RUN)/python setup.py build_ext --inplace

$(VENV)/built: $(VENV)/ready $(SOURCES)
	$(RUN)/pip install --quiet --no-build-isolation --editable . -c constraints.txt && touch $@

$(VENV)/ready: constraints.txt requirements-dev.txt requirements-onnx.txt requirements-report.txt requirements-zoo.txt
	$(PYTHON) -m venv $(VENV) && $(RUN)/pip install --quiet $(TORCH) --constraint constraints.txt
	$(RUN)/pip install --quiet -r requirements-dev.txt -r requirements-onnx.txt -r requirements-report.txt -c constraints.txt && touch $@

clean:
	rm -rf build $(VENV) qtoolkit/*.so
