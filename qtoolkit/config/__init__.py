"""What to quantize and how: frozen values that compare, print, and go to JSON and back."""

from qtoolkit.config.kinds import Kind
from qtoolkit.config.mapping import Match, QConfig, QConfigMapping
from qtoolkit.config.spec import QuantSpec

__all__ = ["Kind", "Match", "QConfig", "QConfigMapping", "QuantSpec"]
