"""The real weights and images of the benchmarks, and the mark of tests that need them."""

import pytest

from benchmarks.real_data import DATA, MISSING

__all__ = ["DATA", "needs_data"]

needs_data = pytest.mark.skipif(DATA is None, reason=MISSING)
