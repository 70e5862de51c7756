"""Which op of LiteRT computes each op of aten: one record a kind of kernel."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

from torch import fx

from qtoolkit.export.tflite.elementwise import (
    attention,
    batch_norm,
    binary,
    check_binary,
    check_relu,
    elu,
    fixed,
    gelu,
    hardsigmoid,
    layer_norm,
    leaky_relu,
    prelu,
    relu,
    silu,
    softmax,
    unary,
)
from qtoolkit.export.tflite.flatbuffer import Scales, Value
from qtoolkit.export.tflite.layers import (
    check_conv,
    check_conv_transpose,
    conv1d,
    conv2d,
    conv_transpose2d,
    linear,
    matmul,
    no_groups,
)
from qtoolkit.export.tflite.moves import (
    cat,
    check_cat,
    check_same_grid,
    permute,
    pixel_shuffle,
    reshape,
    same,
    select,
    slice_of,
    stack,
    zero_pad,
)
from qtoolkit.export.tflite.ops import Op, arguments
from qtoolkit.export.tflite.recurrent import cell, gru_step, layer, lstm_step
from qtoolkit.export.tflite.sampling import (
    adaptive_pool,
    avg_pool,
    bilinear,
    max_pool,
    mean,
    nearest,
)

# The grids of outputs that LiteRT's kernels fix.
LOGISTIC, TANH = Scales((1 / 256,), -128), Scales((1 / 128,), 0)
NO_INTEGERS = "LiteRT has no integer kernel for {}"
OTHER_INTEGERS = "training does not simulate the gates and cell states of 16 bits in LiteRT's integer kernel for {}"


@dataclass(frozen=True)
class Kernel:
    """How LiteRT computes an op of aten.

    Attributes:
        name: The kernel in results.
        aten: The ops of aten.
        emit: Adds its ops to the file, and returns the output, or its outputs.
        refusal: Why it has no integer kernel, with {} for the op; "" if it has one.
        inputs: The arguments that have to be codes for it.
        wide: Whether this kernel computes on int16 codes too.
        joins: Whether it computes a ReLU or ReLU6 behind it too.
        computes: Whether it computes, and is listed; not what moves values.
        check: Why an op has no integer kernel, though its tensors have codes; "" if it has.
    """

    name: str
    aten: tuple[str, ...]
    emit: Callable[[Op], Value | tuple[Value, ...]]
    refusal: str = ""
    inputs: tuple[str, ...] = ("input", "self", "tensors")
    wide: bool = True
    joins: bool = False
    computes: bool = True
    check: Callable[[Op], str] = lambda op: ""

    def data(self, node: fx.Node) -> list[fx.Node]:
        """Return the inputs of an op that have to be codes."""
        found = arguments(node)
        given = (found[name] for name in self.inputs if name in found)
        return [source for each in given for source in (each if isinstance(each, list | tuple) else [each])]


_moving = partial(Kernel, computes=False, check=check_same_grid)

ALL: tuple[Kernel, ...] = (
    Kernel("CONV_2D", ("conv2d",), conv2d, inputs=("input", "weight"), joins=True, check=check_conv),
    Kernel("CONV_2D", ("conv1d",), conv1d, inputs=("input", "weight"), joins=True, check=check_conv),
    Kernel("TRANSPOSE_CONV", ("conv_transpose2d",), no_groups(conv_transpose2d), inputs=("input", "weight"), joins=True,
           check=check_conv_transpose),
    Kernel("FULLY_CONNECTED", ("linear",), linear, inputs=("input", "weight"), joins=True, check=check_conv),
    Kernel("BATCH_MATMUL", ("matmul", "bmm"), matmul, inputs=("self", "other", "mat2")),
    Kernel("ADD", ("add",), binary("ADD", "AddOptions"), inputs=("self", "other"), joins=True, check=check_binary),
    Kernel("SUB", ("sub",), binary("SUB", "SubOptions"), inputs=("self", "other"), joins=True, check=check_binary),
    Kernel("MUL", ("mul",), binary("MUL", "MulOptions"), inputs=("self", "other"), joins=True, check=check_binary),
    Kernel("DIV", ("div",), binary("DIV", "DivOptions"), refusal=NO_INTEGERS),
    Kernel("LOGISTIC", ("sigmoid",), unary("LOGISTIC"), check=fixed(LOGISTIC)),
    Kernel("TANH", ("tanh",), unary("TANH"), check=fixed(TANH)),
    Kernel("SOFTMAX", ("softmax",), softmax, check=fixed(LOGISTIC)),
    Kernel("LEAKY_RELU", ("leaky_relu",), leaky_relu),
    Kernel("HARD_SWISH", ("hardswish",), unary("HARD_SWISH"), wide=False),
    Kernel("GELU", ("gelu",), gelu, wide=False),
    Kernel("PRELU", ("prelu",), prelu, refusal=NO_INTEGERS),
    Kernel("EXP and ADD", ("elu",), elu, refusal=NO_INTEGERS),
    Kernel("LOGISTIC and MUL", ("silu",), silu, refusal=NO_INTEGERS),
    Kernel("RELU6 and MUL", ("hardsigmoid",), hardsigmoid, refusal=NO_INTEGERS),
    Kernel("RELU", ("relu", "relu6", "hardtanh", "clamp"), relu, check=check_relu),
    Kernel("MUL and ADD", ("batch_norm",), batch_norm, refusal=NO_INTEGERS),
    Kernel("MEAN and MUL", ("layer_norm",), layer_norm, refusal=NO_INTEGERS),
    Kernel("BATCH_MATMUL and SOFTMAX", ("scaled_dot_product_attention",), attention, refusal=NO_INTEGERS),
    Kernel("LSTM by steps", ("lstm",), layer(lstm_step), refusal=OTHER_INTEGERS),
    Kernel("LSTM by steps", ("lstm_cell",), cell(lstm_step), refusal=OTHER_INTEGERS),
    Kernel("GRU by steps", ("gru",), layer(gru_step), refusal=NO_INTEGERS),
    Kernel("GRU by steps", ("gru_cell",), cell(gru_step), refusal=NO_INTEGERS),
    Kernel("MAX_POOL_2D", ("max_pool2d",), max_pool, joins=True, check=check_same_grid),
    Kernel("AVERAGE_POOL_2D", ("avg_pool2d",), avg_pool, joins=True, check=check_same_grid),
    Kernel("AVERAGE_POOL_2D", ("adaptive_avg_pool2d",), adaptive_pool, joins=True, check=check_same_grid),
    Kernel("MEAN", ("mean",), mean),
    _moving("RESIZE_NEAREST_NEIGHBOR", ("upsample_nearest2d",), nearest),
    Kernel("RESIZE_BILINEAR", ("upsample_bilinear2d",), bilinear, check=check_same_grid),
    Kernel("CONCATENATION", ("cat", "concat"), cat, computes=False, check=check_cat),
    Kernel("CONCATENATION", ("stack",), stack, computes=False, check=check_cat),
    _moving("none", ("dropout", "dropout_", "clone", "contiguous", "alias", "detach", "_to_copy", "to"), same),
    _moving("RESHAPE", ("view", "reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "_unsafe_view"), reshape),
    _moving("TRANSPOSE", ("permute", "transpose", "t", "numpy_T"), permute),
    _moving("SLICE", ("slice", "narrow"), slice_of),
    _moving("SLICE", ("select",), select),
    _moving("PAD", ("pad", "constant_pad_nd"), zero_pad),
    _moving("TRANSPOSE", ("pixel_shuffle",), pixel_shuffle),
)  # fmt: skip
# By the ops, and by the forms in place of those that compute.
KERNELS: Mapping[str, Kernel] = {
    f"{name}{end}": kernel for kernel in ALL for name in kernel.aten for end in ("", "_" * kernel.computes)
}
