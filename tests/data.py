"""Where the real weights and images are: shared/data beside the checkout, or the folder that QTOOLKIT_DATA names."""

import os
from pathlib import Path

import pytest

PLACES = [
    Path(os.environ.get("QTOOLKIT_DATA", "/nonexistent")),
    *(p / "shared" / "data" for p in Path(__file__).parents),
]
DATA = next((place for place in PLACES if place.is_dir()), None)

needs_data = pytest.mark.skipif(
    DATA is None, reason="needs the real weights and images of shared/data beside the checkout, which is missing"
)
