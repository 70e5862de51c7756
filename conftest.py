"""What every test starts with: a seed, and the names that the docstrings' examples use without importing them."""

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

pytest_plugins = ("pytester",)  # for tests/test_sweep.py; only a top-level conftest may name plugins

# The examples of modules whose packages are not installed do not run.
NEEDED_BY = {
    "qtoolkit/integrations/ultralytics.py": "ultralytics",
    "qtoolkit/export/executorch.py": "executorch",
    "qtoolkit/export/litert.py": "ai_edge_litert",
}
collect_ignore = [module for module, package in NEEDED_BY.items() if find_spec(package) is None]
# Ultralytics would ask for the network, install packages, and write into the home folder.
os.environ.update(YOLO_OFFLINE="1", YOLO_AUTOINSTALL="0")
os.environ.setdefault("YOLO_CONFIG_DIR", str(Path(__file__).parent / "build" / "ultralytics"))

# torch.manual_seed formats the stack for each kind of device that is not there, which takes longer than many a test.
SEED = torch.manual_seed if torch.accelerator.is_available() else torch.default_generator.manual_seed


@pytest.fixture(autouse=True)
def _docstring_names(doctest_namespace: dict[str, object]) -> None:
    import qtoolkit

    doctest_namespace.update(torch=torch, qt=qtoolkit)
    SEED(0)
