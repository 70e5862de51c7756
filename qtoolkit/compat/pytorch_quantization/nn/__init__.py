"""pytorch_quantization.nn, which scripts import as quant_nn."""

from typing import TYPE_CHECKING, Any

from qtoolkit.compat.pytorch_quantization.nn import functional, modules
from qtoolkit.compat.pytorch_quantization.nn.functional import Clip
from qtoolkit.compat.pytorch_quantization.nn.modules.layers import LAYERS
from qtoolkit.compat.pytorch_quantization.nn.modules.quant_rnn import QuantLSTM, QuantLSTMCell
from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer

QUANTIZED = {**LAYERS, "QuantLSTM": QuantLSTM, "QuantLSTMCell": QuantLSTMCell}
_NAMES = {**QUANTIZED, **{name.removeprefix("Quant"): cls for name, cls in QUANTIZED.items()}}
globals().update(_NAMES)

__all__ = ["Clip", "TensorQuantizer", "functional", "modules"]
__all__ += list(_NAMES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
