"""Settings of the whole suite."""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

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

# Scripts that tests run, and faults that a sanitized build must find, which make sanitize runs.
collect_ignore = ["compat/legacy_scripts", *([] if "QTOOLKIT_SANITIZE" in os.environ else ["sanitize"])]


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture
def threads():
    """Sets the number of threads; the old one comes back."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
