"""Post-training methods beyond ranges: of weights, biases and statistics, from a few batches without labels."""

from qtoolkit.public import publish
from qtoolkit.tuning.batch_norm import Reestimation, reestimate_batch_norm
from qtoolkit.tuning.bias_correction import BiasCorrection, bias_correction
from qtoolkit.tuning.equalize import Equalization, Pair, equalize
from qtoolkit.tuning.gptq import GPTQ, LayerError, gptq
from qtoolkit.tuning.reconstruct import Reconstruction, UnitResult, reconstruct
from qtoolkit.tuning.smooth_quant import Smoothed, SmoothQuant, smooth_quant

__all__ = [
    "GPTQ",
    "BiasCorrection",
    "Equalization",
    "LayerError",
    "Pair",
    "Reconstruction",
    "Reestimation",
    "SmoothQuant",
    "Smoothed",
    "UnitResult",
    "bias_correction",
    "equalize",
    "gptq",
    "reconstruct",
    "reestimate_batch_norm",
    "smooth_quant",
]
publish(__name__, BiasCorrection, Equalization, Pair, Reconstruction, Reestimation, UnitResult)
publish(__name__, GPTQ, LayerError, Smoothed, SmoothQuant)
