"""The table of op kinds: the modules, functions, operators and methods of each kind, and all that a pass asks of it.

A new op is a new form of a kind, or a new kind: one entry here, and a test. Which kinds a target computes in integers is in its
own table (`qtoolkit.backends`).
"""

import builtins
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.nn import functional as F

from qtoolkit.errors import check_known
from qtoolkit.op_kinds import rules

# Arguments that are data, by position, each with its keyword names; () is a position that is no data.
Operands = tuple[tuple[str, ...], ...]

ONE: Operands = (("input", "x"),)
TWO: Operands = (("input",), ("other", "mat2"))
WEIGHTED: Operands = (("input", "x"), ("weight",))
_ATTENTION: Operands = (("query",), ("key",), ("value",))


@dataclass(frozen=True)
class Form:
    """One way in which ops of a kind appear in a graph.

    Attributes:
        modules: Module types. They take their data as the arguments in `operands`, except weights, which they own.
        functions: Functions and operators, in-place ones too.
        methods: Names of tensor methods, in-place ones too.
        operands: The arguments that are data.
        rest: Whether all arguments after the last operand are data too (torch.einsum).
        items: The positions of its output tensors in the tuple that it returns; () where it returns the tensor itself.
            Attention weights, and the states of a recurrent layer after all steps, are not among them.
        refine: Returns the name of the kind from a node's arguments, where the op alone does not tell it.
    """

    modules: tuple[type[nn.Module], ...] = ()
    functions: tuple[Callable[..., Any], ...] = ()
    methods: tuple[str, ...] = ()
    operands: Operands = ONE
    rest: bool = False
    items: tuple[int, ...] = ()
    refine: Callable[[fx.Node], str] | None = None


@dataclass(frozen=True)
class OpKind:
    """One kind of op. Every flag that a pass asks for is here.

    Attributes:
        name: The name, as a Backend's roles and reports have it.
        forms: How its ops appear. Kinds without forms are found by the `refine` of another kind's form.
        moves: The output holds values of the input: reshapes, slices, max pools.
        activation: Computed as one op with the op before it, on targets that can.
        layer: A layer with one weight and output channels: a batch norm after it can be folded into it.
        has_weight: A module of this kind owns weights.
        weight_argument: A function of this kind can take a weight as an argument.
        multiplies: Computes matrix products. Targets compute these in integers even if their output is not quantized.
        fuses_add: Targets with `residual_add="identity"` compute this op and an add after it as one.
        sums: Adds or subtracts two tensors.
        with_constant: One of its two operands is a constant, which is not quantized.
        never_negative: The output is never negative.
        keeps_sign: The output is never negative if no input is.
        takes_indices: The input holds indices, which have no range.
        one_tensor: Returns one tensor, not several.
    """

    name: str
    forms: tuple[Form, ...] = ()
    moves: bool = False
    activation: bool = False
    layer: bool = False
    has_weight: bool = False
    weight_argument: bool = False
    multiplies: bool = False
    fuses_add: bool = False
    sums: bool = False
    with_constant: bool = False
    never_negative: bool = False
    keeps_sign: bool = False
    takes_indices: bool = False
    one_tensor: bool = True

    def __str__(self) -> str:
        return self.name


def _named(*names: str) -> tuple[Callable[..., Any], ...]:
    """Return the functions of these names in torch and torch.nn.functional: some are in one, some in both."""
    return tuple(getattr(owner, name) for owner in (torch, F) for name in names if hasattr(owner, name))


def _for_each_size(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}{d}d" for d in (1, 2, 3))


def _kind(name: str, *forms: Form, **flags: bool) -> OpKind:
    return OpKind(name, forms, **flags)


def _layer(name: str, modules: tuple[type[nn.Module], ...], *functions: str, fuses_add: bool = False) -> OpKind:
    form = Form(modules, _named(*functions), operands=WEIGHTED)
    return _kind(name, form, layer=True, has_weight=True, weight_argument=True, multiplies=True, fuses_add=fuses_add)


def _binary(name: str, *functions: str, refine: Callable[[fx.Node], str], reflected: tuple[str, ...] = ()) -> Form:
    """Return the form of an op on two tensors: torch's functions, the operators and the methods."""
    plain = tuple(getattr(torch, function) for function in functions)
    operators = tuple(getattr(operator, prefix + name) for prefix in ("", "i"))
    methods = [f"{function}{end}" for function in functions for end in ("", "_")]
    methods += [f"__{name}__", f"__i{name}__", *reflected]
    return Form(functions=(*operators, *plain), methods=tuple(methods), operands=TWO, refine=refine)


def _moving(name: str, *forms: Form, one_tensor: bool = True) -> OpKind:
    return _kind(name, *forms, moves=True, keeps_sign=True, one_tensor=one_tensor)


def _activation(name: str, *forms: Form, never_negative: bool = False) -> OpKind:
    return _kind(name, *forms, activation=True, never_negative=never_negative)


_POOLS = (*_for_each_size("max_pool"), *_for_each_size("adaptive_max_pool"))

_PRODUCTS = (
    _layer("conv", (nn.Conv1d, nn.Conv2d, nn.Conv3d), *_for_each_size("conv"), fuses_add=True),
    _layer("conv_transpose", (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
           *_for_each_size("conv_transpose"), fuses_add=True),
    _layer("linear", (nn.Linear,), "linear"),
    _kind("matmul",
          Form(functions=(torch.matmul, torch.bmm, torch.mm, operator.matmul, operator.imatmul),
               methods=("matmul", "bmm", "mm", "__matmul__"), operands=TWO),
          Form(functions=(torch.addmm, torch.baddbmm), methods=("addmm", "baddbmm"),
               operands=((), ("mat1", "batch1"), ("mat2", "batch2"))),
          weight_argument=True, multiplies=True),
    _kind("einsum", Form(functions=(torch.einsum,), operands=((), ("operands",)), rest=True, refine=rules.einsum)),
    _kind("attention", Form((nn.MultiheadAttention,), operands=_ATTENTION, items=(0,)),
          has_weight=True, multiplies=True, one_tensor=False),
    _kind("dot_product_attention", Form(functions=(F.scaled_dot_product_attention,), operands=_ATTENTION), multiplies=True),
    _kind("recurrent", Form((nn.LSTM, nn.GRU), items=(0,)), Form((nn.LSTMCell,), items=(0, 1)), Form((nn.GRUCell,)),
          has_weight=True, one_tensor=False),
    _kind("embedding", Form((nn.Embedding, nn.EmbeddingBag), (F.embedding, F.embedding_bag), operands=()),
          has_weight=True, takes_indices=True),
)  # fmt: skip

_ELEMENTWISE = (
    _kind("add", _binary("add", "add", refine=rules.add, reflected=("__radd__",)), sums=True, keeps_sign=True),
    _kind("sub", _binary("sub", "sub", "subtract", refine=rules.sub), sums=True),
    _kind("mul", _binary("mul", "mul", "multiply", refine=rules.mul, reflected=("__rmul__",)), keeps_sign=True),
    _kind("div", _binary("truediv", "div", "divide", "true_divide", refine=rules.div), keeps_sign=True),
    _kind("scale", with_constant=True),
    _kind("shift", with_constant=True),
    _kind("cat", Form(functions=_named("cat", "concat", "concatenate", "hstack", "vstack", "dstack"),
                      operands=(("tensors",),)), keeps_sign=True),
    _kind("stack", Form(functions=(torch.stack,), operands=(("tensors",),)), keeps_sign=True),
)  # fmt: skip

_SAMPLING = (
    _moving("max_pool", Form(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        _named(*(f"{pool}{end}" for pool in _POOLS for end in ("", "_with_indices"))))),
    _kind("avg_pool", Form(
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        _named(*_for_each_size("avg_pool"), *_for_each_size("adaptive_avg_pool"))), keeps_sign=True),
    _kind("mean", Form(functions=(torch.mean,), methods=("mean",), refine=rules.mean), keeps_sign=True),
    _moving("upsample_nearest",
            Form((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), (F.interpolate, F.upsample),
                 refine=rules.upsample),
            Form(functions=(F.upsample_nearest,))),
    _kind("upsample_linear", Form(functions=(F.upsample_bilinear,)), keeps_sign=True),
    _kind("upsample_cubic"),
)  # fmt: skip

_MOVING = (
    _moving("flatten", Form((nn.Flatten,), (torch.flatten,), ("flatten",))),
    _moving("reshape", Form(
        (nn.Unflatten,), _named("reshape", "squeeze", "unsqueeze", "unflatten", "tile", "broadcast_to", "ravel"),
        ("reshape", "reshape_as", "view", "view_as", "squeeze", "squeeze_", "unsqueeze", "unsqueeze_", "unflatten",
         "expand", "expand_as", "repeat", "tile", "broadcast_to", "ravel"))),
    _moving("transpose",
            Form(functions=_named("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "roll", "flip"),
                 methods=("permute", "transpose", "transpose_", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "roll",
                          "flip")),
            Form(functions=(builtins.getattr,), refine=rules.attribute)),
    _moving("split", Form(functions=_named("chunk", "split", "tensor_split", "unbind"),
                          methods=("chunk", "split", "tensor_split", "unbind"), operands=(("input", "tensor"),)),
            one_tensor=False),
    _moving("slice", Form(functions=(operator.getitem,), refine=rules.item),
            Form(functions=(torch.narrow, torch.select), methods=("narrow", "select"))),
    _moving("zero_pad", Form(
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
        (F.pad,), refine=rules.pad)),
    _moving("edge_pad", Form((
        nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
        nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d))),
    _kind("pad"),
    _moving("pixel_shuffle", Form((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
                                  (F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle))),
    _moving("identity", Form(
        (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.clone),
        ("contiguous", "clone", "detach"))),
)  # fmt: skip

_NORMS = (
    _kind("batch_norm", Form((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
                             (F.batch_norm, torch.batch_norm))),
    _kind("layer_norm", Form((nn.LayerNorm,), (F.layer_norm, torch.layer_norm))),
    _kind("rms_norm", Form((nn.RMSNorm,), (F.rms_norm, torch.rms_norm))),
    _kind("group_norm", Form((nn.GroupNorm,), (F.group_norm, torch.group_norm))),
    _kind("instance_norm", Form((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
                                (F.instance_norm, torch.instance_norm))),
)  # fmt: skip

_ACTIVATIONS = (
    _activation("relu", Form((nn.ReLU,), _named("relu", "relu_"), ("relu", "relu_")), never_negative=True),
    _activation("relu6", Form((nn.ReLU6,), (F.relu6,)), never_negative=True),
    _activation("clamp", Form((nn.Hardtanh,), (F.hardtanh, F.hardtanh_), refine=rules.clamp),
                Form(functions=_named("clamp", "clamp_", "clip", "clip_"), methods=("clamp", "clamp_", "clip", "clip_"),
                     refine=rules.clamp)),
    _activation("leaky_relu", Form((nn.LeakyReLU,), _named("leaky_relu", "leaky_relu_"))),
    _activation("prelu", Form((nn.PReLU,), _named("prelu"), ("prelu",))),
    _activation("elu", Form((nn.ELU, nn.CELU, nn.SELU), _named("elu", "elu_", "celu", "celu_", "selu", "selu_"))),
    _activation("silu", Form((nn.SiLU,), (F.silu,))),
    _activation("mish", Form((nn.Mish,), (F.mish,))),
    _activation("gelu", Form((nn.GELU,), (F.gelu,))),
    _activation("hardswish", Form((nn.Hardswish,), (F.hardswish,))),
    _activation("hardsigmoid", Form((nn.Hardsigmoid,), (F.hardsigmoid,)), never_negative=True),
    _activation("sigmoid", Form((nn.Sigmoid,), _named("sigmoid", "sigmoid_"), ("sigmoid", "sigmoid_")), never_negative=True),
    _activation("tanh", Form((nn.Tanh,), _named("tanh", "tanh_"), ("tanh", "tanh_"))),
    _activation("softplus", Form((nn.Softplus,), (F.softplus,)), never_negative=True),
    _kind("softmax", Form((nn.Softmax, nn.Softmax2d), _named("softmax"), ("softmax",)), never_negative=True),
    _kind("log_softmax", Form((nn.LogSoftmax,), _named("log_softmax"), ("log_softmax",))),
)  # fmt: skip

KINDS: Mapping[str, OpKind] = {
    kind.name: kind for kind in (*_PRODUCTS, *_ELEMENTWISE, *_SAMPLING, *_MOVING, *_NORMS, *_ACTIVATIONS)
}
# What the table does not know: an op may do anything, and a module may own weights.
OTHER = OpKind(rules.OTHER, has_weight=True, one_tensor=False)
# Nodes of a graph that are no ops.
NO_OPS: Mapping[str, OpKind] = {op: OpKind(op, one_tensor=False) for op in ("placeholder", "get_attr", "output")}

MOVES = tuple(kind.name for kind in KINDS.values() if kind.moves)
ACTIVATIONS = tuple(kind.name for kind in KINDS.values() if kind.activation)

Entry = tuple[OpKind, Form]
_ENTRIES: tuple[Entry, ...] = tuple((kind, form) for kind in KINDS.values() for form in kind.forms)
_IDENTITY: Entry = (KINDS["identity"], Form())
# Functions and modules of packages that qtoolkit does not import, by module and name.
FOREIGN: Mapping[tuple[str, str], Entry] = {
    ("torchvision.ops.stochastic_depth", "stochastic_depth"): _IDENTITY,
    ("timm.layers.drop", "DropPath"): _IDENTITY,
}
OF_MODULE: Mapping[type[nn.Module], Entry] = {module: entry for entry in _ENTRIES for module in entry[1].modules}
OF_FUNCTION: Mapping[Any, Entry] = {function: entry for entry in _ENTRIES for function in entry[1].functions}
OF_METHOD: Mapping[str, Entry] = {method: entry for entry in _ENTRIES for method in entry[1].methods}


def kind_named(name: str) -> OpKind:
    """Return the kind of a name, "other" included.

    Raises:
        ValueError: No kind has this name; says which is nearest.
    """
    if name == OTHER.name:
        return OTHER
    check_known("kind of op", name, KINDS)
    return KINDS[name]
