"""Settings of the ops' tests."""

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def _two_threads(threads: Callable[[int], None]) -> None:
    """Work is split over threads here, though make test gives each of its processes one."""
    threads(2)
