"""The table of op kinds, in all vocabularies: torch's modules, functions, operators and methods, aten's ops and ONNX's.

A new op is a new form of a kind, or a new kind: one entry here, and a test. Which kinds a target computes in integers is in its
own table (`qtoolkit.backends`).
"""

import builtins
import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from qtoolkit.errors import check_known
from qtoolkit.op_kinds import rules
from qtoolkit.op_kinds.kind import ATTENTION, TWO, WEIGHTED, Bounds, Form, OpKind, Read, bounded
from qtoolkit.op_kinds.recorded import by_mode


def _named(*names: str) -> tuple[Callable[..., object], ...]:
    """Return the functions of these names in torch and torch.nn.functional: some are in one, some in both."""
    return tuple(getattr(owner, name) for owner in (torch, F) for name in names if hasattr(owner, name))


def _for_each_size(kind: str) -> tuple[str, ...]:
    return tuple(f"{kind}{d}d" for d in (1, 2, 3))


def _kind(
    name: str,
    *forms: Form,
    onnx: tuple[str, ...] = (),
    aten: tuple[str, ...] = (),
    recognized: tuple[Callable[..., Tensor], ...] = (),
    **flags: bool,
) -> OpKind:
    return OpKind(name, forms, onnx, aten, recognized, **flags)


def _layer(
    name: str, modules: tuple[type[nn.Module], ...], *functions: str, onnx: tuple[str, ...], **flags: bool
) -> OpKind:
    form = Form(modules, _named(*functions), operands=WEIGHTED)
    layer = _kind(
        name, form, onnx=onnx, layer=True, has_weight=True, weight_argument=True, multiplies=True, smooth=True
    )
    return replace(layer, **flags)  # type: ignore[arg-type]  # of flags alone


def _binary(name: str, *functions: str, refine: Callable[[fx.Node], str], reflected: tuple[str, ...] = ()) -> Form:
    """Return the form of an op on two tensors: torch's functions, the operators and the methods."""
    plain = tuple(getattr(torch, function) for function in functions)
    operators = tuple(getattr(operator, prefix + name) for prefix in ("", "i"))
    methods = [f"{function}{end}" for function in functions for end in ("", "_")]
    methods += [f"__{name}__", f"__i{name}__", *reflected]
    return Form(functions=(*operators, *plain), methods=tuple(methods), operands=TWO, refine=refine)


_moving = partial(_kind, moves=True, keeps_sign=True, smooth=True)
_rearranging = partial(_moving, rearranges=True)
_activation = partial(_kind, activation=True)

_POOLS = (*_for_each_size("max_pool"), *_for_each_size("adaptive_max_pool"))
_POOLS_OF_ALL = tuple(f"{pool}{end}" for pool in _POOLS for end in ("", "_with_indices"))

_PRODUCTS = (
    _layer("conv", (nn.Conv1d, nn.Conv2d, nn.Conv3d), *_for_each_size("conv"), onnx=("Conv",), convolves=True,
           fuses_add=True),
    _layer("conv_transpose", (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
           *_for_each_size("conv_transpose"), onnx=("ConvTranspose",), convolves=True, transposed=True, fuses_add=True),
    _layer("linear", (nn.Linear,), "linear", onnx=("Gemm", "MatMul")),
    _kind("matmul",
          Form(functions=(torch.matmul, torch.bmm, torch.mm, operator.matmul, operator.imatmul),
               methods=("matmul", "bmm", "mm", "__matmul__"), operands=TWO),
          Form(functions=(torch.addmm, torch.baddbmm), methods=("addmm", "baddbmm"),
               operands=((), ("mat1", "batch1"), ("mat2", "batch2"))),
          onnx=("MatMul",), weight_argument=True, multiplies=True, of_two_matrices=True, smooth=True),
    _kind("einsum", Form(functions=(torch.einsum,), operands=((), ("operands",)), rest=True, refine=rules.einsum),
          may_view=True),
    _kind("attention", Form((nn.MultiheadAttention,), operands=ATTENTION, items=(0,)),
          has_weight=True, multiplies=True, one_tensor=False),
    _kind("dot_product_attention", Form(functions=(F.scaled_dot_product_attention,), operands=ATTENTION),
          onnx=("Attention",), multiplies=True, holds_softmax=True),
    _kind("recurrent", Form((nn.LSTM, nn.GRU), items=(0,)), Form((nn.LSTMCell,), items=(0, 1)), Form((nn.GRUCell,)),
          onnx=("LSTM", "GRU"), has_weight=True, multiplies=True, keeps_state=True, one_tensor=False),
    _kind("embedding", Form((nn.Embedding, nn.EmbeddingBag), (F.embedding, F.embedding_bag), operands=()),
          has_weight=True, takes_indices=True),
)  # fmt: skip

_ELEMENTWISE = (
    _kind("add", _binary("add", "add", refine=rules.add, reflected=("__radd__",)), onnx=("Add",),
          elementwise=True, sums=True, adds=True, keeps_sign=True, smooth=True),
    _kind("sub", _binary("sub", "sub", "subtract", refine=rules.sub), onnx=("Sub",), elementwise=True, sums=True, smooth=True),
    _kind("mul", _binary("mul", "mul", "multiply", refine=rules.mul, reflected=("__rmul__",)), onnx=("Mul",),
          elementwise=True, elementwise_product=True, keeps_sign=True),
    _kind("div", _binary("truediv", "div", "divide", "true_divide", refine=rules.div), onnx=("Div",), elementwise=True,
          keeps_sign=True),
    _kind("scale", onnx=("Mul", "Div"), with_constant=True),
    _kind("shift", onnx=("Add", "Sub"), with_constant=True, smooth=True),
    _kind("abs", Form(functions=(operator.abs, torch.abs, torch.absolute), methods=("abs", "abs_", "absolute", "absolute_")),
          onnx=("Abs",), elementwise=True, never_negative=True, homogeneous=True, smooth=True),
    _kind("cat", Form(functions=_named("cat", "concat", "concatenate", "hstack", "vstack", "dstack"),
                      operands=(("tensors",),), refine=rules.cat),
          onnx=("Concat",), aten=("cat", "concat", "hstack", "vstack"), concatenates=True, keeps_sign=True, smooth=True),
    _kind("stack", Form(functions=(torch.stack,), operands=(("tensors",),), refine=rules.stack), aten=("stack",),
          concatenates=True, keeps_sign=True, smooth=True),
)  # fmt: skip

_RESIZE = ("Resize", "Upsample")
_SAMPLING = (
    _moving("max_pool", Form(
        (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d),
        _named(*_POOLS_OF_ALL)),
        onnx=("MaxPool", "GlobalMaxPool"), aten=_POOLS_OF_ALL, takes_maxima=True, homogeneous=True),
    _moving("max", Form(functions=(torch.max, torch.amax), methods=("max", "amax"), refine=rules.maximum),
            onnx=("ReduceMax",), aten=("max", "amax"), takes_maxima=True),
    _moving("min", Form(functions=(torch.min, torch.amin), methods=("min", "amin"), refine=rules.minimum),
            onnx=("ReduceMin",), aten=("min", "amin")),
    _kind("avg_pool", Form(
        (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
        _named(*_for_each_size("avg_pool"), *_for_each_size("adaptive_avg_pool"))),
        onnx=("AveragePool", "GlobalAveragePool", "ReduceMean"), keeps_sign=True, homogeneous=True, smooth=True),
    _kind("mean", Form(functions=(torch.mean,), methods=("mean",), refine=rules.mean), onnx=("ReduceMean",),
          means_over_dims=True, keeps_sign=True, homogeneous=True, smooth=True),
    _moving("upsample_nearest",
            Form((nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d), (F.interpolate, F.upsample),
                 refine=rules.upsample),
            Form(functions=(F.upsample_nearest,)),
            onnx=_RESIZE, aten=_for_each_size("upsample_nearest"), homogeneous=True),
    _kind("upsample_linear", Form(functions=(F.upsample_bilinear,)), onnx=_RESIZE, keeps_sign=True, homogeneous=True,
          smooth=True),
    _kind("upsample_cubic", onnx=_RESIZE, smooth=True),
)  # fmt: skip

_MOVING = (
    _rearranging("flatten", Form((nn.Flatten,), (torch.flatten,), ("flatten",)), onnx=("Flatten",), aten=("flatten",)),
    _rearranging("reshape", Form(
        (nn.Unflatten,), _named("reshape", "squeeze", "unsqueeze", "unflatten", "tile", "broadcast_to", "ravel"),
        ("reshape", "reshape_as", "view", "view_as", "squeeze", "squeeze_", "unsqueeze", "unsqueeze_", "unflatten",
         "expand", "expand_as", "repeat", "tile", "broadcast_to", "ravel")),
        onnx=("Reshape", "Squeeze", "Unsqueeze", "Expand", "Tile"),
        aten=("view", "reshape", "unflatten", "squeeze", "unsqueeze", "expand", "repeat", "tile", "broadcast_to")),
    _rearranging("transpose",
                 Form(functions=_named("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t", "roll",
                                       "flip"),
                      methods=("permute", "transpose", "transpose_", "swapaxes", "swapdims", "movedim", "moveaxis", "t",
                               "roll", "flip")),
                 Form(functions=(builtins.getattr,), refine=rules.attribute),
                 onnx=("Transpose",),
                 aten=("permute", "transpose", "t", "swapaxes", "movedim", "numpy_T", "roll", "flip")),
    _moving("split", Form(functions=_named(*rules.SPLITS), methods=rules.SPLITS, operands=(("input", "tensor"),)),
            onnx=("Split",), aten=("split", "split_with_sizes", "chunk", "unbind", "tensor_split"), one_tensor=False),
    _moving("slice", Form(functions=(operator.getitem,), refine=rules.item),
            Form(functions=(torch.narrow, torch.select), methods=("narrow", "select")),
            onnx=("Slice",), aten=("slice", "select", "narrow", "getitem")),
    _moving("zero_pad", Form(
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
        (F.pad,), refine=rules.pad),
        onnx=("Pad",), aten=("pad", "constant_pad_nd"), pads_with_zero=True, homogeneous=True),
    _moving("edge_pad", Form((
        nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
        nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d)),
        onnx=("Pad",), aten=(*_for_each_size("reflection_pad"), *_for_each_size("replication_pad")), homogeneous=True),
    _kind("pad", onnx=("Pad",), aten=("pad", "constant_pad_nd"), pads_off_grid=True),
    _moving("pixel_shuffle", Form((nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
                                  (F.pixel_shuffle, F.pixel_unshuffle, F.channel_shuffle)),
            onnx=("DepthToSpace", "SpaceToDepth"), aten=("pixel_shuffle", "pixel_unshuffle", "channel_shuffle")),
    _rearranging("identity", Form(
        (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout),
        (F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, torch.clone),
        ("contiguous", "clone", "detach")),
        Form(functions=(by_mode,), operands=((), (), ("in_eval",))),
        onnx=("Identity", "Dropout", "Cast"), aten=("clone", "contiguous", "alias", "dropout", "dropout_"), returns_input=True,
        homogeneous=True),
)  # fmt: skip

_NORMS = (
    _kind("batch_norm", Form((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
                             (F.batch_norm, torch.batch_norm)),
          onnx=("BatchNormalization",), normalizes=True, normalizes_batches=True, smooth=True),
    _kind("layer_norm", Form((nn.LayerNorm,), (F.layer_norm, torch.layer_norm)), onnx=("LayerNormalization",),
          normalizes=True),
    _kind("rms_norm", Form((nn.RMSNorm,), (F.rms_norm, torch.rms_norm)), onnx=("RMSNormalization",), normalizes=True),
    _kind("group_norm", Form((nn.GroupNorm,), (F.group_norm, torch.group_norm)), onnx=("GroupNormalization",),
          normalizes=True),
    _kind("instance_norm", Form((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
                                (F.instance_norm, torch.instance_norm)), onnx=("InstanceNormalization",), normalizes=True),
)  # fmt: skip

_HARDTANH = bounded((1, "min_val", -1.0), (2, "max_val", 1.0))
_CLAMP = bounded((1, "min", None), (2, "max", None))
_ACTIVATIONS = (
    _activation("relu", Form((nn.ReLU,), _named("relu", "relu_"), ("relu", "relu_"), bounds=bounded(0.0)),
                onnx=("Relu",), aten=("relu",), clips=True, never_negative=True, homogeneous=True, smooth=True),
    _activation("relu6", Form((nn.ReLU6,), (F.relu6,), bounds=bounded(0.0, 6.0)), onnx=("Clip",), aten=("hardtanh", "relu6"),
                clips=True, never_negative=True, smooth=True),
    _activation("clamp", Form((nn.Hardtanh,), (F.hardtanh, F.hardtanh_), refine=rules.by_bounds(_HARDTANH), bounds=_HARDTANH),
                Form(functions=_named("clamp", "clamp_", "clip", "clip_"), methods=("clamp", "clamp_", "clip", "clip_"),
                     refine=rules.by_bounds(_CLAMP), bounds=_CLAMP, passes_at_bounds=True),
                onnx=("Clip",), aten=("hardtanh", "clamp"), clips=True, smooth=True),
    _activation("leaky_relu", Form((nn.LeakyReLU,), _named("leaky_relu", "leaky_relu_"),
                                   bounds=bounded(0.0, slope=(1, "negative_slope", 0.01))),
                onnx=("LeakyRelu",), homogeneous=True, smooth=True),
    _activation("prelu", Form((nn.PReLU,), _named("prelu"), ("prelu",)), onnx=("PRelu",), homogeneous=True, smooth=True),
    _activation("elu", Form((nn.ELU, nn.CELU, nn.SELU), _named("elu", "elu_", "celu", "celu_", "selu", "selu_")),
                onnx=("Elu", "Celu", "Selu")),
    _activation("silu", Form((nn.SiLU,), (F.silu,)), onnx=("Swish",), recognized=(F.silu,), has_sigmoid_gate=True),
    _activation("mish", Form((nn.Mish,), (F.mish,)), onnx=("Mish",), recognized=(F.mish,)),
    _activation("gelu", Form((nn.GELU,), (F.gelu,)), onnx=("Gelu",),
                recognized=(F.gelu, partial(F.gelu, approximate="tanh"))),
    _activation("hardswish", Form((nn.Hardswish,), (F.hardswish,)), onnx=("HardSwish",), recognized=(F.hardswish,)),
    _activation("hardsigmoid", Form((nn.Hardsigmoid,), (F.hardsigmoid,)), onnx=("HardSigmoid",),
                recognized=(F.hardsigmoid,), never_negative=True),
    _activation("sigmoid", Form((nn.Sigmoid,), _named("sigmoid", "sigmoid_"), ("sigmoid", "sigmoid_")),
                onnx=("Sigmoid",), is_sigmoid=True, never_negative=True, smooth=True),
    _activation("tanh", Form((nn.Tanh,), _named("tanh", "tanh_"), ("tanh", "tanh_")), onnx=("Tanh",), smooth=True),
    _activation("softplus", Form((nn.Softplus,), (F.softplus,)), onnx=("Softplus",), never_negative=True),
    _kind("softmax", Form((nn.Softmax, nn.Softmax2d), _named("softmax"), ("softmax",)), onnx=("Softmax",),
          normalizes_scores=True, never_negative=True, smooth=True),
    _kind("log_softmax", Form((nn.LogSoftmax,), _named("log_softmax"), ("log_softmax",)), onnx=("LogSoftmax",)),
)  # fmt: skip

KINDS: Mapping[str, OpKind] = {
    kind.name: kind for kind in (*_PRODUCTS, *_ELEMENTWISE, *_SAMPLING, *_MOVING, *_NORMS, *_ACTIVATIONS)
}
# What the table does not know: an op may do anything, and a module may own weights.
OTHER = OpKind(rules.OTHER, has_weight=True, one_tensor=False)
# Nodes of a graph that are no ops.
NO_OPS: Mapping[str, OpKind] = {op: OpKind(op, one_tensor=False) for op in ("placeholder", "get_attr", "output")}

MOVES = tuple(kind.name for kind in KINDS.values() if kind.moves)
CONCATS = tuple(kind.name for kind in KINDS.values() if kind.concatenates)
ACTIVATIONS = tuple(kind.name for kind in KINDS.values() if kind.activation)

Entry = tuple[OpKind, Form]
_ENTRIES: tuple[Entry, ...] = tuple((kind, form) for kind in KINDS.values() for form in kind.forms)
IDENTITY: Entry = (KINDS["identity"], Form())
# Functions and modules of packages that qtoolkit does not import, by module and name.
FOREIGN: Mapping[tuple[str, str], Entry] = {("torchvision.ops.stochastic_depth", "stochastic_depth"): IDENTITY}
OF_MODULE: Mapping[type[nn.Module], Entry] = {module: entry for entry in _ENTRIES for module in entry[1].modules}
OF_FUNCTION: Mapping[object, Entry] = {function: entry for entry in _ENTRIES for function in entry[1].functions}
OF_METHOD: Mapping[str, Entry] = {method: entry for entry in _ENTRIES for method in entry[1].methods}


def _by_name(names_of: Callable[[OpKind], tuple[str, ...]]) -> Mapping[str, tuple[OpKind, ...]]:
    found: dict[str, tuple[OpKind, ...]] = {}
    for kind in KINDS.values():
        for name in names_of(kind):
            found[name] = (*found.get(name, ()), kind)
    return found


# The kinds that each op of another vocabulary may be of.
OF_ONNX = _by_name(lambda kind: kind.onnx)
OF_ATEN = _by_name(lambda kind: kind.aten)
# What finds the bounds of each op of aten that clips, in its arguments: torch names its functions, and their arguments, alike.
CLIPS_OF_ATEN: Mapping[str, Callable[[Read], Bounds]] = {
    function.__name__: form.bounds
    for kind, form in _ENTRIES
    for function in form.functions
    if kind.clips and form.bounds is not None and function.__name__ in kind.aten
}


def calls_where(holds: Callable[[OpKind], bool]) -> frozenset[object]:
    """Return the functions, operators and names of methods of the kinds for which something holds."""
    forms = (form for kind in KINDS.values() if holds(kind) for form in kind.forms)
    return frozenset(call for form in forms for call in (*form.functions, *form.methods))


def names_where(holds: Callable[[OpKind], bool]) -> frozenset[str]:
    """Return the names of the functions, operators and methods of the kinds for which something holds."""
    return frozenset(str(getattr(call, "__name__", call)) for call in calls_where(holds))


MEANS = calls_where(lambda kind: kind.means_over_dims)


def bounds_of_module(module: nn.Module) -> Bounds | None:
    """Return the bounds of the module of a piecewise linear activation; None for other modules."""
    entry = OF_MODULE.get(type(module))
    if entry is None or entry[1].bounds is None:
        return None
    return entry[1].bounds(lambda position, name, default: getattr(module, name, default))


def kind_named(name: str) -> OpKind:
    """Return the kind of a name, "other" included; ValueError with the nearest one for a name of no kind."""
    if name == OTHER.name:
        return OTHER
    check_known("kind of op", name, KINDS)
    return KINDS[name]


def kind_of_type(qat_type: type[object]) -> OpKind:
    """Return the kind that a QAT type declares; OTHER for a type of the user's own that declares none."""
    return kind_named(getattr(qat_type, "KIND", OTHER.name))
