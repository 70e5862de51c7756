"""Table of the LiteRT ops that compute aten ops: one record for each kind of kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import fx

from qtoolkit.export.tflite import elementwise, layers, moves, recurrent, windows
from qtoolkit.export.tflite.flatbuffer import Scales, TensorInFile
from qtoolkit.export.tflite.ops import TfliteOp, arguments

# The grids of outputs that LiteRT's kernels fix.
LOGISTIC, TANH = Scales((1 / 256,), -128), Scales((1 / 128,), 0)
NO_INTEGERS = "LiteRT has no integer kernel for {}"
OTHER_INTEGERS = "training does not simulate the 16-bit gates and cell states of LiteRT's integer kernel for {}"


@dataclass(frozen=True)
class TfliteKernel:
    """The LiteRT kernel of an aten op."""

    name: str  # the kernel in results
    aten: tuple[str, ...]  # the ops of aten
    emit: Callable[
        [TfliteOp], TensorInFile | tuple[TensorInFile, ...]
    ]  # adds its ops to the file, and returns the output, or its outputs
    refusal: str = ""  # why it has no integer kernel, with {} for the op; "" if it has one
    inputs: tuple[str, ...] = ("input", "self", "tensors")  # the arguments that have to be codes for it
    wide: bool = True  # whether this kernel computes on int16 codes too
    joins: bool = False  # whether it computes a ReLU or ReLU6 behind it too
    computes: bool = True  # whether it computes, and is listed; not what moves values
    # the reason why an op has no integer kernel although its tensors are quantized; "" if it has one
    check: Callable[[TfliteOp], str] = lambda op: ""

    def data(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of an op that must be quantized: nodes, not Python numbers."""
        found = arguments(node)
        given = (found[name] for name in self.inputs if name in found)
        sources = (source for each in given for source in (each if isinstance(each, list | tuple) else [each]))
        return [source for source in sources if isinstance(source, fx.Node)]


LEAKY_RELU = elementwise.unary("LEAKY_RELU", alpha=lambda op: float(op.args["negative_slope"]))
GELU = elementwise.unary("GELU", approximate=lambda op: op.args["approximate"] != "none")

_layer = partial(TfliteKernel, inputs=("input", "weight"), joins=True, check=layers.check_weight)
_of_two = partial(TfliteKernel, inputs=("self", "other"), joins=True, check=elementwise.check_binary)
_pool = partial(TfliteKernel, joins=True, check=moves.check_same_grid)
_moving = partial(TfliteKernel, computes=False, check=moves.check_same_grid)
_joining = partial(TfliteKernel, computes=False, check=moves.check_cat)
_in_float = partial(TfliteKernel, refusal=NO_INTEGERS)

ALL: tuple[TfliteKernel, ...] = (
    _layer("CONV_2D", ("conv2d",), layers.conv2d),
    _layer("CONV_2D", ("conv1d",), layers.conv1d),
    _layer("TRANSPOSE_CONV", ("conv_transpose2d",), layers.conv_transpose2d, check=partial(layers.check_weight, axis=1)),
    _layer("FULLY_CONNECTED", ("linear",), layers.linear),
    TfliteKernel("BATCH_MATMUL", ("matmul", "bmm"), layers.matmul, inputs=("self", "other", "mat2")),
    _of_two("ADD", ("add",), elementwise.binary("ADD")),
    _of_two("SUB", ("sub",), elementwise.binary("SUB")),
    _of_two("SUB", ("rsub",), elementwise.binary("SUB", ("other", "self"))),
    _of_two("MUL", ("mul",), elementwise.binary("MUL")),
    _in_float("DIV", ("div",), elementwise.binary("DIV")),
    _in_float("DIV", ("reciprocal",), elementwise.reciprocal),
    _in_float("POW", ("pow",), elementwise.binary("POW", ("self", "exponent"))),
    _in_float("NEG", ("neg",), elementwise.unary("NEG")),
    TfliteKernel("LOGISTIC", ("sigmoid",), elementwise.unary("LOGISTIC"), check=elementwise.fixed(LOGISTIC)),
    TfliteKernel("TANH", ("tanh",), elementwise.unary("TANH"), check=elementwise.fixed(TANH)),
    TfliteKernel("SOFTMAX", ("softmax",), elementwise.softmax, check=elementwise.fixed(LOGISTIC)),
    TfliteKernel("LEAKY_RELU", ("leaky_relu",), LEAKY_RELU),
    TfliteKernel("HARD_SWISH", ("hardswish",), elementwise.unary("HARD_SWISH"), wide=False),
    TfliteKernel("ABS", ("abs",), elementwise.unary("ABS")),
    TfliteKernel("GELU", ("gelu",), GELU, wide=False),
    _in_float("PRELU", ("prelu",), elementwise.prelu),
    _in_float("EXP and ADD", ("elu",), elementwise.elu),
    _in_float("LOGISTIC and MUL", ("silu",), elementwise.silu),
    _in_float("RELU6 and MUL", ("hardsigmoid",), elementwise.hardsigmoid),
    TfliteKernel("RELU", ("relu", "relu6", "hardtanh", "clamp"), elementwise.relu, check=elementwise.check_relu),
    _in_float("MUL and ADD", ("batch_norm",), elementwise.batch_norm),
    _in_float("MEAN and MUL", ("layer_norm",), elementwise.layer_norm),
    _in_float("BATCH_MATMUL and SOFTMAX", ("scaled_dot_product_attention",), elementwise.attention),
    TfliteKernel("LSTM by steps", ("lstm",), recurrent.layer(recurrent.lstm_step), refusal=OTHER_INTEGERS),
    TfliteKernel("LSTM by steps", ("lstm_cell",), recurrent.cell(recurrent.lstm_step), refusal=OTHER_INTEGERS),
    _in_float("GRU by steps", ("gru",), recurrent.layer(recurrent.gru_step)),
    _in_float("GRU by steps", ("gru_cell",), recurrent.cell(recurrent.gru_step)),
    _pool("MAX_POOL_2D", ("max_pool2d",), windows.max_pool),
    _pool("AVERAGE_POOL_2D", ("avg_pool2d",), windows.avg_pool),
    _pool("AVERAGE_POOL_2D", ("adaptive_avg_pool2d",), windows.adaptive_pool),
    TfliteKernel("MEAN", ("mean",), windows.reduction("MEAN")),
    _moving("REDUCE_MAX", ("amax", "max"), windows.reduction("REDUCE_MAX")),
    _moving("REDUCE_MIN", ("amin", "min"), windows.reduction("REDUCE_MIN")),
    _moving("RESIZE_NEAREST_NEIGHBOR", ("upsample_nearest2d",), windows.nearest),
    TfliteKernel("RESIZE_BILINEAR", ("upsample_bilinear2d",), windows.bilinear, check=moves.check_same_grid),
    _joining("CONCATENATION", ("cat", "concat"), moves.cat),
    _joining("CONCATENATION", ("stack",), moves.stack),
    _moving("none", ("dropout", "dropout_", "clone", "contiguous", "alias", "detach", "_to_copy", "to"), moves.same),
    _moving("RESHAPE", ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view"), moves.reshape),
    _moving("TRANSPOSE", ("permute", "transpose", "t", "numpy_T"), moves.permute),
    _moving("SLICE", ("slice", "narrow"), moves.slice_of),
    _moving("SLICE", ("select",), moves.select),
    _moving("PAD", ("pad", "constant_pad_nd"), moves.zero_pad),
    _moving("TRANSPOSE", ("pixel_shuffle",), moves.pixel_shuffle),
)  # fmt: skip
# By op, and by the replacement forms of ops.
KERNELS: Mapping[str, TfliteKernel] = {
    f"{name}{end}": kernel for kernel in ALL for name in kernel.aten for end in ("", "_" * kernel.computes)
}
