"""pytorch_quantization.nn, which scripts import as quant_nn."""

from typing import TYPE_CHECKING, Any

from qtoolkit.compat.pytorch_quantization.nn import functional, modules
from qtoolkit.compat.pytorch_quantization.nn.functional import Clip
from qtoolkit.compat.pytorch_quantization.nn.modules.layers import LAYERS, NAMES
from qtoolkit.compat.pytorch_quantization.nn.modules.quant_rnn import LSTM, LSTMCell, QuantLSTM, QuantLSTMCell
from qtoolkit.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer

QUANTIZED = {**LAYERS, "QuantLSTM": QuantLSTM, "QuantLSTMCell": QuantLSTMCell}
globals().update(NAMES)

__all__ = ["LSTM", "Clip", "LSTMCell", "QuantLSTM", "QuantLSTMCell", "TensorQuantizer", "functional", "modules"]
__all__ += list(NAMES)

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any: ...
