"""The table of ops: each kind's modules, functions, operators and methods, and which of their arguments are data."""

import builtins
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from qtoolkit.op_kinds import rules as rules

# Arguments that are data, by position, each with the keywords it goes by; () is a position that is no data.
Operands = tuple[tuple[str, ...], ...]

ONE: Operands = (("input", "x"),)
TWO: Operands = (("input",), ("other", "mat2"))
WEIGHTED: Operands = (("input", "x"), ("weight",))


@dataclass(frozen=True)
class Row:
    """One row of the table.

    Attributes:
        kind: The kind of these ops.
        modules: Module types; all take their data as arguments of `operands`, but for weights.
        functions: Functions and operators, in-place ones too.
        methods: Names of tensor methods, in-place ones too.
        operands: Which arguments are data.
        rest: All arguments from the last operand on are data (torch.einsum's).
        refine: Tells the kind from a node's arguments, where the name alone does not.
    """

    kind: str
    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    operands: Operands = ONE
    rest: bool = False
    refine: Callable[[fx.Node], str] | None = None


def _named(*names: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions of these names that torch and torch.nn.functional have: some are in one, some in both."""
    return tuple(getattr(owner, name) for owner in (torch, F) for name in names if hasattr(owner, name))


def _for_each_size(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}{d}d" for d in (1, 2, 3))


COMPUTE_ROWS = (
    Row("conv", (nn.Conv1d, nn.Conv2d, nn.Conv3d), _named(*_for_each_size("conv")), operands=WEIGHTED),
    Row(
        "conv_transpose",
        (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
        _named(*_for_each_size("conv_transpose")),
        operands=WEIGHTED,
    ),
    Row("linear", (nn.Linear,), (F.linear,), operands=WEIGHTED),
    Row(
        "matmul",
        functions=(torch.matmul, torch.bmm, torch.mm, operator.matmul, operator.imatmul),
        methods=("matmul", "bmm", "mm", "__matmul__"),
        operands=TWO,
    ),
    Row(
        "matmul",
        functions=(torch.addmm, torch.baddbmm),
        methods=("addmm", "baddbmm"),
        operands=((), ("mat1", "batch1"), ("mat2", "batch2")),
    ),
    Row("einsum", functions=(torch.einsum,), operands=((), ("operands",)), rest=True, refine=rules.einsum),
    Row(
        "attention",
        (nn.MultiheadAttention,),
        (F.scaled_dot_product_attention,),
        operands=(("query",), ("key",), ("value",)),
    ),
    Row("recurrent", (nn.LSTM, nn.GRU, nn.LSTMCell, nn.GRUCell)),
    Row("embedding", (nn.Embedding, nn.EmbeddingBag), (F.embedding, F.embedding_bag), operands=()),
)

ELEMENTWISE_ROWS = (
    Row(
        "add",
        functions=(operator.add, operator.iadd, torch.add),
        methods=("add", "add_", "__add__", "__iadd__", "__radd__"),
        operands=TWO,
        refine=rules.add,
    ),
    Row(
        "sub",
        functions=(operator.sub, operator.isub, torch.sub, torch.subtract),
        methods=("sub", "sub_", "subtract", "subtract_", "__sub__", "__isub__"),
        operands=TWO,
        refine=rules.sub,
    ),
    Row(
        "mul",
        functions=(operator.mul, operator.imul, torch.mul, torch.multiply),
        methods=("mul", "mul_", "multiply", "multiply_", "__mul__", "__imul__", "__rmul__"),
        operands=TWO,
        refine=rules.mul,
    ),
    Row(
        "div",
        functions=(operator.truediv, operator.itruediv, torch.div, torch.divide, torch.true_divide),
        methods=("div", "div_", "divide", "divide_", "true_divide", "true_divide_", "__truediv__", "__itruediv__"),
        operands=TWO,
        refine=rules.div,
    ),
    Row(
        "cat", functions=_named("cat", "concat", "concatenate", "hstack", "vstack", "dstack"), operands=(("tensors",),)
    ),
    Row("stack", functions=(torch.stack,), operands=(("tensors",),)),
)

POOL_ROWS = (
    Row(
        "max_pool",
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        _named(*(f"{pool}{end}" for pool in (*_for_each_size("max_pool"), *_for_each_size("adaptive_max_pool"))
                 for end in ("", "_with_indices"))),
    ),
    Row(
        "avg_pool",
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        _named(*_for_each_size("avg_pool"), *_for_each_size("adaptive_avg_pool")),
    ),
    Row("mean", functions=(torch.mean,), methods=("mean",), refine=rules.mean),
    Row(
        "upsample",
        (nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d),
        (F.interpolate, F.upsample),
        refine=rules.upsample,
    ),
    Row("upsample_nearest", functions=(F.upsample_nearest,)),
    Row("upsample_linear", functions=(F.upsample_bilinear,)),
)  # fmt: skip

# Ops that move, pick or repeat values and make none.
MOVE_ROWS = (
    Row("flatten", (nn.Flatten,), (torch.flatten,), ("flatten",)),
    Row(
        "reshape",
        (nn.Unflatten,),
        _named("reshape", "squeeze", "unsqueeze", "unflatten", "tile", "broadcast_to", "ravel"),
        ("reshape", "reshape_as", "view", "view_as", "squeeze", "squeeze_", "unsqueeze", "unsqueeze_", "unflatten",
         "expand", "expand_as", "repeat", "tile", "broadcast_to", "ravel"),
    ),
    Row(
        "transpose",
        functions=_named("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "roll", "flip"),
        methods=("permute", "transpose", "transpose_", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "roll", "flip"),
    ),
    Row("transpose", functions=(builtins.getattr,), refine=rules.attribute),
    Row("split", functions=_named("chunk", "split", "tensor_split", "unbind"),
        methods=("chunk", "split", "tensor_split", "unbind"), operands=(("input", "tensor"),)),
    Row("slice", functions=(operator.getitem,), refine=rules.item),
    Row("slice", functions=(torch.narrow, torch.select), methods=("narrow", "select")),
    Row(
        "zero_pad",
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
        (F.pad,),
        refine=rules.pad,
    ),
    Row(
        "edge_pad",
        (nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
         nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d),
    ),
    Row(
        "pixel_shuffle",
        (nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        (F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle),
    ),
    Row(
        "identity",
        (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.clone),
        ("contiguous", "clone", "detach"),
    ),
)  # fmt: skip

NORM_ROWS = (
    Row(
        "batch_norm",
        (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
        (F.batch_norm, torch.batch_norm),
    ),
    Row("layer_norm", (nn.LayerNorm,), (F.layer_norm, torch.layer_norm)),
    Row("rms_norm", (nn.RMSNorm,), (F.rms_norm, torch.rms_norm)),
    Row("group_norm", (nn.GroupNorm,), (F.group_norm, torch.group_norm)),
    Row(
        "instance_norm",
        (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
        (F.instance_norm, torch.instance_norm),
    ),
)

ACTIVATION_ROWS = (
    Row("relu", (nn.ReLU,), _named("relu", "relu_"), ("relu", "relu_")),
    Row("relu6", (nn.ReLU6,), (F.relu6,)),
    Row("clamp", (nn.Hardtanh,), (F.hardtanh, F.hardtanh_), refine=rules.clamp),
    Row("clamp", functions=_named("clamp", "clamp_", "clip", "clip_"), methods=("clamp", "clamp_", "clip", "clip_"),
        refine=rules.clamp),
    Row("leaky_relu", (nn.LeakyReLU,), _named("leaky_relu", "leaky_relu_")),
    Row("prelu", (nn.PReLU,), _named("prelu"), ("prelu",)),
    Row("elu", (nn.ELU, nn.CELU, nn.SELU), _named("elu", "elu_", "celu", "celu_", "selu", "selu_")),
    Row("silu", (nn.SiLU,), (F.silu,)),
    Row("mish", (nn.Mish,), (F.mish,)),
    Row("gelu", (nn.GELU,), (F.gelu,)),
    Row("hardswish", (nn.Hardswish,), (F.hardswish,)),
    Row("hardsigmoid", (nn.Hardsigmoid,), (F.hardsigmoid,)),
    Row("sigmoid", (nn.Sigmoid,), _named("sigmoid", "sigmoid_"), ("sigmoid", "sigmoid_")),
    Row("tanh", (nn.Tanh,), _named("tanh", "tanh_"), ("tanh", "tanh_")),
    Row("softplus", (nn.Softplus,), (F.softplus,)),
    Row("softmax", (nn.Softmax, nn.Softmax2d), _named("softmax"), ("softmax",)),
    Row("log_softmax", (nn.LogSoftmax,), _named("log_softmax"), ("log_softmax",)),
)  # fmt: skip

ROWS = (*COMPUTE_ROWS, *ELEMENTWISE_ROWS, *POOL_ROWS, *MOVE_ROWS, *NORM_ROWS, *ACTIVATION_ROWS)

# Functions and modules of packages that qtoolkit does not import, by module and name.
FOREIGN = {
    ("torchvision.ops.stochastic_depth", "stochastic_depth"): Row("identity"),
    ("timm.layers.drop", "DropPath"): Row("identity"),
}

ROW_OF_KIND = {row.kind: row for row in reversed(ROWS) if row.modules}
ROW_OF_MODULE = {module: row for row in ROWS for module in row.modules}
ROW_OF_FUNCTION = {function: row for row in ROWS for function in row.functions}
ROW_OF_METHOD = {method: row for row in ROWS for method in row.methods}

# What `refine` can answer besides a row's own kind.
REFINED = ("scale", "shift", "upsample_nearest", "upsample_linear", "upsample_cubic", "avg_pool", "pad", "edge_pad")
KINDS = tuple(dict.fromkeys([*(row.kind for row in ROWS if row.kind != "upsample"), *REFINED]))

# Ops whose outputs are values of their inputs.
MOVES = (*dict.fromkeys(row.kind for row in MOVE_ROWS), "max_pool", "upsample_nearest")
ACTIVATIONS = tuple(row.kind for row in ACTIVATION_ROWS if "softmax" not in row.kind)
