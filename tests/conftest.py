"""Settings of the whole suite."""

import gc
import os
import time

import pytest
import torch
from hypothesis import HealthCheck, settings

from qtoolkit.quantizers import first_steps
from tests import torchlib
from tests.sweep import left_out

pytest_plugins = ("pytester",)
# Examples are drawn anew on a developer's machine and are the same in every run of CI.
settings.register_profile(
    "qtoolkit",
    deadline=None,
    max_examples=60,
    database=None,
    derandomize="CI" in os.environ,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
settings.load_profile("qtoolkit")

gc.disable()  # while the tests are collected: of a million objects none is garbage


def pytest_collection_finish() -> None:
    """Leave what is imported and collected out of every search for garbage to come."""
    gc.freeze()
    gc.enable()
    gc.set_threshold(10_000)  # Python's 700 take a third of the time of an export


@pytest.fixture(scope="module", autouse=True)
def _what_a_module_has_left():
    """Leave out what the tests of a module have imported, too: exporters and compilers are as large as all that was before."""
    yield
    gc.collect()
    gc.freeze()


# Scripts that tests run, and faults that a sanitized build must find, which make sanitize runs.
collect_ignore = ["compat/legacy_scripts", *([] if "QTOOLKIT_SANITIZE" in os.environ else ["sanitize"])]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--sweep", action="store_true", help="run all cases of the tests marked sweep (tests/sweep.py)")
    parser.addoption("--few", action="store_true", help="run one case of each test")
    parser.addoption("--rest", action="store_true", help='leave out what --few -m "not slow" runs')
    parser.addoption("--seconds", type=float, help="skip, with that reason, the tests that would start later")


@pytest.hookimpl(trylast=True)  # after -k and -m
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    names = set() if config.getoption("sweep") else left_out(items, config.getoption("few"))
    if config.getoption("rest"):
        quick = [item for item in items if item.get_closest_marker("slow") is None]
        names |= {item.nodeid for item in quick} - left_out(quick, few=True)
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in names])
    items[:] = [item for item in items if item.nodeid not in names]


STARTED = time.monotonic()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if (seconds := item.config.getoption("seconds")) is not None and time.monotonic() - STARTED > seconds:
        pytest.skip("no time is left; make test-all runs it")


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Give the tensors that a module makes when it is imported the same values in every run and with every choice of tests."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _one_table_of_translations():
    torchlib.read_once()


@pytest.fixture
def threads():
    """Sets the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_steps_of_other_tests():
    """Forget the quantizers of a test, whose kinds it may have taken out of the table."""
    yield
    first_steps.WATCHER.quantizers.clear()
