"""Calibrators with pytorch-quantization's numerics: the largest magnitude, or a range chosen from a histogram."""

from qtoolkit.compat.pytorch_quantization.calib.calibrator import MaxCalibrator, _Calibrator
from qtoolkit.compat.pytorch_quantization.calib.histogram import HistogramCalibrator, calibrate_weights

__all__ = ["HistogramCalibrator", "MaxCalibrator", "_Calibrator", "calibrate_weights"]
