"""Post-training methods beyond ranges: equalized channels, and rounding that is learned from a few batches."""

from qtoolkit.public import publish
from qtoolkit.tuning.batch_norm import Reestimation, reestimate_batch_norm
from qtoolkit.tuning.bias_correction import BiasCorrection, bias_correction
from qtoolkit.tuning.equalize import Equalization, Pair, equalize
from qtoolkit.tuning.reconstruct import Reconstruction, UnitResult, reconstruct

__all__ = [
    "BiasCorrection",
    "Equalization",
    "Pair",
    "Reconstruction",
    "Reestimation",
    "UnitResult",
    "bias_correction",
    "equalize",
    "reconstruct",
    "reestimate_batch_norm",
]
publish(__name__, BiasCorrection, Equalization, Pair, Reconstruction, Reestimation, UnitResult)
