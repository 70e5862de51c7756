"""Beyond ranges: what a training loop and the choice of bits need."""

from qtoolkit.tuning import mixed_precision
from qtoolkit.tuning.distillation import Distillation
from qtoolkit.tuning.schedule import QuantizationSchedule

__all__ = ["Distillation", "QuantizationSchedule", "mixed_precision"]
