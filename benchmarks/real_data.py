"""Where the real weights and images are: shared/data beside the checkout, or the folder that QTOOLKIT_DATA names."""

import os
from pathlib import Path

PLACES = [
    Path(os.environ.get("QTOOLKIT_DATA", "/nonexistent")),
    *(p / "shared" / "data" for p in Path(__file__).resolve().parents),
]
DATA = next((place for place in PLACES if place.is_dir()), None)
MISSING = (
    "the real weights and images of shared/data beside the checkout are missing; QTOOLKIT_DATA names their folder."
)
