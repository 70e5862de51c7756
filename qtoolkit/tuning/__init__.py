"""Post-training methods beyond ranges: rounding that is learned from a few batches."""

from qtoolkit.public import publish
from qtoolkit.tuning.reconstruct import Reconstruction, UnitResult, reconstruct

__all__ = ["Reconstruction", "UnitResult", "reconstruct"]
publish(__name__, Reconstruction, UnitResult)
