"""Names that the docstrings' examples use without importing them."""

import pytest
import torch

pytest_plugins = ("pytester",)  # for tests/test_sweep.py; only a top-level conftest may name plugins


@pytest.fixture(autouse=True)
def _docstring_names(doctest_namespace: dict[str, object]) -> None:
    import qtoolkit

    doctest_namespace.update(torch=torch, qt=qtoolkit)
    torch.manual_seed(0)
