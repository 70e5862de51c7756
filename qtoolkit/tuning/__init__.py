"""Methods beyond calibration: post-training methods and mixed precision; for training a schedule, distillation and damping."""

from qtoolkit.public import publish
from qtoolkit.tuning import mixed_precision
from qtoolkit.tuning.batch_norm import Reestimation, reestimate_batch_norm
from qtoolkit.tuning.bias_correction import BiasCorrection, bias_correction
from qtoolkit.tuning.distillation import Distillation
from qtoolkit.tuning.equalize import Equalization, Pair, equalize
from qtoolkit.tuning.gptq import GPTQ, LayerError, gptq
from qtoolkit.tuning.oscillation import OscillationDampening, OscillationFreezing
from qtoolkit.tuning.oscillations.code_tracks import LayerOscillation, Oscillations
from qtoolkit.tuning.partial_updates import PartialUpdates
from qtoolkit.tuning.reconstruct import Reconstruction, UnitResult, reconstruct
from qtoolkit.tuning.schedule import QuantizationSchedule
from qtoolkit.tuning.smooth_quant import Smoothed, SmoothQuant, smooth_quant

__all__ = [
    "GPTQ", "BiasCorrection", "Distillation", "Equalization", "LayerError", "LayerOscillation", "OscillationDampening",
    "OscillationFreezing", "Oscillations", "Pair", "PartialUpdates", "QuantizationSchedule", "Reconstruction", "Reestimation",
    "SmoothQuant", "Smoothed", "UnitResult", "bias_correction", "equalize", "gptq", "mixed_precision", "reconstruct",
    "reestimate_batch_norm", "smooth_quant",
]  # fmt: skip
publish(__name__, BiasCorrection, Equalization, Pair, Reconstruction, Reestimation, UnitResult)
publish(__name__, GPTQ, LayerError, LayerOscillation, Oscillations, Smoothed, SmoothQuant)
