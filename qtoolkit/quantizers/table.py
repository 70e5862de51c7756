"""The tables of QuantSpec's `quantizer` and `observer`.

To add a learned quantizer, write a subclass of `QuantizerKind` and one line in `QUANTIZERS`. `QuantSpec(quantizer=...)`
then knows its name and checks its options; `TensorQuantizer`, the reports, checkpoints, conversion and export need no
change. A quantizer that trains the logarithm of the scale:

    >>> from torch import nn
    >>> class LogScale(QuantizerKind):
    ...     label = "log_scale"
    ...     OPTIONS = {"grad_factor": 1.0}
    ...     def tensors(self, spec, shape):
    ...         return {**super().tensors(spec, shape), "_scale": nn.Parameter(torch.full(shape, torch.nan))}
    ...     def set_grid(self, quantizer, scale, zero_point):
    ...         super().set_grid(quantizer, scale.log2(), zero_point)
    ...     def grid(self, quantizer):
    ...         return quantizer._scale.exp2(), quantizer._zero_point
    ...     def grad_factor(self, quantizer, x):
    ...         return self.options(quantizer.spec)["grad_factor"]
    >>> QUANTIZERS["log_scale"] = LogScale()
    >>> spec = qt.QuantSpec(bits=4, quantizer="log_scale", quantizer_args={"grad_factor": 0.1})
    >>> spec.describe()
    'int4 log_scale'
    >>> quantizer = qt.TensorQuantizer(spec)
    >>> quantizer.amax = 7.0
    >>> quantizer(torch.tensor([0.6, 100.0]))
    tensor([1., 7.], grad_fn=...)
    >>> del QUANTIZERS["log_scale"]

To add an observer, write a subclass of `Observer` and one line in `OBSERVERS`.
"""

from qtoolkit.config import spec
from qtoolkit.quantizers import observers
from qtoolkit.quantizers.kinds.apot import APoT
from qtoolkit.quantizers.kinds.base import QuantizerKind
from qtoolkit.quantizers.kinds.clipped import DSQ, PACT, LearnedRange
from qtoolkit.quantizers.kinds.dorefa import DoReFa
from qtoolkit.quantizers.kinds.fixed import FixedScale
from qtoolkit.quantizers.kinds.lsq import LSQ, LSQPlus
from qtoolkit.quantizers.kinds.qil import QIL
from qtoolkit.quantizers.kinds.tqt import TQT

QUANTIZERS: dict[str, QuantizerKind] = spec.QUANTIZERS
QUANTIZERS |= {
    "fixed": FixedScale(),
    "lsq": LSQ(),
    "lsq_plus": LSQPlus(),
    "pact": PACT(),
    "learned_range": LearnedRange(),
    "dsq": DSQ(),
    "tqt": TQT(),
    "dorefa": DoReFa(),
    "apot": APoT(),
    "qil": QIL(),
}
OBSERVERS: dict[str, type[observers.Observer]] = spec.OBSERVERS
OBSERVERS |= {
    "minmax": observers.RangeObserver,
    "moving_average": observers.MovingAverageObserver,
    "clip_std": observers.ClipStdObserver,
    "lsq": observers.LSQStartObserver,
    "histogram": observers.HistogramObserver,
    "moving_histogram": observers.MovingHistogramObserver,
    "pow2": observers.Pow2Observer,
    "pow2_mode": observers.Pow2ModeObserver,
    "constant": observers.ConstantRangeObserver,
}
