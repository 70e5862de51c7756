"""Settings of the tests of the ops."""

from collections.abc import Callable

import pytest


@pytest.fixture(autouse=True)
def _two_threads(threads: Callable[[int], None]) -> None:
    """Ops split their work over two threads; `make test` gives each test process one by default."""
    threads(2)
