"""What every test starts with: a seed, and the names that the docstrings' examples use without importing them."""

import pytest
import torch

pytest_plugins = ("pytester",)  # for tests/test_sweep.py; only a top-level conftest may name plugins

# torch.manual_seed formats the stack for each kind of device that is not there, which takes longer than many a test.
SEED = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _docstring_names(doctest_namespace: dict[str, object]) -> None:
    import qtoolkit

    doctest_namespace.update(torch=torch, qt=qtoolkit)
    SEED(0)
