"""Deployment targets, as data: what each target quantizes, and where.

Each kind of op (`qtoolkit.op_kinds.table`) has a role on a target:

- "compute": its inputs are quantized. Its output stays unquantized until a quantized op takes it.
- "merge": its inputs are quantized too, by the target's rule for residual adds.
- "concat": if a quantized op takes its output, all its inputs are quantized with one scale, which the output then has too.
- "transparent": it moves or picks values without changing them, so the quantizer of its input serves its output.
- "activation": the target fuses it into the op before it, and no quantizer is inserted between the two. After an op
  that cannot fuse it, it is float, or, on a target with `quantize_outputs`, "compute". After an op that needs a
  quantized output (`needs_quantized_output`) and does not fuse it, it is float and takes quantized inputs.
- "float": it is not quantized, and the report says so. Kinds that a target does not name are "float".

A new target is one more table here, and a test.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from qtoolkit.config import QConfig, QuantSpec
from qtoolkit.config.formats import FloatType, WeightCodes
from qtoolkit.errors import check_known, shown
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.op_kinds.table import ACTIVATIONS, CONCATS, KINDS, MOVES

# The default of a required argument `backend` after optional ones.
REQUIRED = "<required>"

Role = Literal["compute", "merge", "concat", "transparent", "activation", "float"]
# The roles of ops whose inputs are quantized.
QUANTIZED_ROLES: tuple[Role, ...] = ("compute", "merge", "concat")


@dataclass(frozen=True)
class Backend:
    """One deployment target. Change a policy with `dataclasses.replace`.

    Attributes:
        name: Its name in reports.
        qconfig: The default config. It also gives the fields that the user's specs leave out. Fields that its own specs
            leave out have QuantSpec's defaults. Axis 0 of a weight stands for the output channel of every kind of
            layer.
        roles: The role of each kind of op.
        conv_transpose_axis: The axis of a transposed convolution's weight that its scales run along.
        grouped_conv_transpose: Whether the target has integer kernels for transposed convolutions with groups. If not, they
            stay in float without a rule for them, and lint reports quantized ones.
        residual_add: The inputs of an add that are quantized: "both", or "identity": all but the branch that ends in a
            layer, so that the target can fuse the add into the layer.
        shared_concat: Whether the inputs of a concat share one scale. If not, each input and the output have their own.
        integer_weights: Whether weights are exported as integers (DequantizeLinear alone), not as floats with both nodes.
        weight_codes: The type in which ONNX files store signed 8-bit weights: "int8"; or "uint8", shifted by 128 with a
            zero point of 128, whose sums onnxruntime computes exactly on every processor.
        integer_bias: Whether the target adds biases to integer sums, in int32, in steps of input scale times weight
            scale. Training and the exported file then round biases to these steps.
        runtime: The entry of `qtoolkit.runtimes.table.RUNTIMES` whose integer arithmetic the target has; None for none.
        advice: Names in `qtoolkit.lint.layers.ADVICE`: ops that are not faster in integers on the target.
        weight_bits: Widths of weights that the target computes in integers; None for all. Lint reports others.
        unsigned_after_relu: Whether a tensor that is never negative is quantized without a sign, if its spec is symmetric.
        integers_in_and_out: Whether ops without weights are quantized only where their output is quantized too.
        needs_quantized_output: Kinds that the target computes in integers only if every op that takes their output
            takes it quantized. The output of a quantized layer of these kinds is always quantized, unless only the
            graph's outputs take it. An op without weights is quantized if an op after it asks for a quantized tensor.
        splits_silu: Whether a SiLU after such an op becomes a sigmoid and a product, which are quantized.
        joined_activations: The activations that are fused into ops of these kinds.
        repeated_pairs: ONNX ops that move values, and that the target executes in integers only if a Q/DQ pair follows
            them too. The file repeats the pair of their input there.
        sub_pixel: Whether the file has a convolution and a DepthToSpace for a transposed convolution with a quantized output
            (`qtoolkit.export.passes.sub_pixel`), because the target has integer kernels for these two alone. A transposed
            convolution that only outputs of the graph take stays float, unless a rule names it.
        quantize_outputs: Whether outputs of ops are quantized as well, after their batch norm and activation: the target
            computes in integers throughout.
        quantize_graph_inputs: Whether inputs of the graph are quantized like other tensors.
        quantize_graph_outputs: Whether outputs of the graph are quantized, if a quantized op computes them.
        end_bits: The least bits of the first and last layers, in the default config and by a global rule; None for no
            minimum. LSQ quantizes them where the config's own quantizer does not have as many bits.
        same_grid: Kinds that compute in integers with one scale and zero point for input and output, which then share a
            quantizer.
        output_specs: The spec of the output of kinds for which the target fixes the scale, at the bits of this spec.
        batch_norm_as_conv: Whether a batch norm after a layer and its activation, which no layer folds, becomes a depthwise
            convolution in eval mode, because the target has integer kernels for these alone.
        batch_norm: How a layer takes over the batch norm after it in training: one of `qtoolkit.nn.batch_norm.STRATEGIES`.
        float_type: The type of the tensors that its files do not quantize, and of the Q/DQ nodes: "float32"; or "float16",
            for a target that computes each tensor in the type that the file gives it. The scales of `qconfig` are numbers
            of this type (`QuantSpec.scale_dtype`), also where its specs name another one.
        silu_form: How files in float16 have x * sigmoid(x): "sigmoid", as torch's exporters write it; "tanh", as
            x * (0.5 * tanh(0.5 * x) + 0.5), for a target that computes this in one op with the layer before it.
        title: A short description of the target.

    Raises:
        ValueError: A kind of op, a role or an option is not known.

    Example:
        >>> import dataclasses
        >>> both = dataclasses.replace(qt.backends["tensorrt"], residual_add="both")
        >>> both.name, both.residual_add, qt.backends["tensorrt"].residual_add
        ('tensorrt', 'both', 'identity')
    """

    name: str
    qconfig: QConfig
    roles: Mapping[str, Role]
    conv_transpose_axis: int = 1
    grouped_conv_transpose: bool = True
    residual_add: Literal["both", "identity"] = "both"
    shared_concat: bool = True
    integer_weights: bool = True
    weight_codes: WeightCodes = "int8"
    integer_bias: bool = False
    runtime: str | None = None
    advice: tuple[str, ...] = ()
    weight_bits: tuple[int, ...] | None = None
    unsigned_after_relu: bool = False
    integers_in_and_out: bool = False
    needs_quantized_output: tuple[str, ...] = ()
    splits_silu: bool = False
    joined_activations: tuple[str, ...] = ACTIVATIONS
    repeated_pairs: tuple[str, ...] = ()
    sub_pixel: bool = False
    quantize_outputs: bool = False
    quantize_graph_inputs: bool = True
    quantize_graph_outputs: bool = False
    end_bits: int | None = None
    same_grid: tuple[str, ...] = ()
    output_specs: Mapping[str, QuantSpec] = field(default_factory=dict)
    batch_norm_as_conv: bool = False
    batch_norm: Literal["unscale", "frozen", "two_convolutions", "std_correction"] = "unscale"
    float_type: FloatType = "float32"
    silu_form: Literal["sigmoid", "tanh"] = "sigmoid"
    title: str = ""

    def __post_init__(self) -> None:
        check_known(f"float_type of Backend {self.name!r}:", self.float_type, get_args(FloatType))
        qconfig = self.qconfig.completed(QConfig()).with_scale_dtype(self.float_type)
        object.__setattr__(self, "qconfig", qconfig)
        for kind, role in self.roles.items():
            check_known(f"kind of op in the roles of Backend {self.name!r}:", kind, KINDS)
            check_known(f"role of {kind!r} in Backend {self.name!r}:", role, get_args(Role))
        for kind in (*self.needs_quantized_output, *self.joined_activations, *self.same_grid, *self.output_specs):
            check_known(f"kind of op in Backend {self.name!r}:", kind, KINDS)
        check_known(f"residual_add of Backend {self.name!r}:", self.residual_add, ("both", "identity"))
        check_known(f"weight_codes of Backend {self.name!r}:", self.weight_codes, get_args(WeightCodes))
        check_known(f"silu_form of Backend {self.name!r}:", self.silu_form, ("sigmoid", "tanh"))
        if self.conv_transpose_axis not in (0, 1):
            raise ValueError(
                f"Backend {self.name!r}: conv_transpose_axis must be 0 (input channels) or 1 (output channels), got "
                f"{self.conv_transpose_axis!r}."
            )
        if self.end_bits is not None and not 2 <= self.end_bits <= 16:
            raise ValueError(f"Backend {self.name!r}: end_bits must be None or lie in [2, 16], got {self.end_bits!r}.")

    def role(self, kind: OpKind) -> Role:
        """Return the role of a kind of op: "float" for kinds that the table does not name."""
        role = self.roles.get(kind.name, "float")
        return "merge" if role == "concat" and not self.shared_concat else role

    def joins(self, kind: OpKind, activation: OpKind) -> bool:
        """Return whether the target computes an op and an activation after it as one."""
        return kind.name not in self.needs_quantized_output or activation.name in self.joined_activations

    def quantizes(self, kind: OpKind) -> bool:
        """Return whether the target computes a kind of op on quantized inputs."""
        return self.role(kind) in QUANTIZED_ROLES

    def frees_a_branch(self) -> bool:
        """Return whether one input of a residual add stays unquantized: the add is fused into its convolution."""
        return self.residual_add == "identity"

    def is_float_without_quantized_output(self, kind: OpKind) -> bool:
        """Return whether the target computes a kind of op in float where its output is not quantized."""
        if kind.name in self.needs_quantized_output:
            return not kind.multiplies
        exempt = kind.multiplies or (kind.adds and not self.frees_a_branch())
        return self.integers_in_and_out and not exempt


def _roles(
    compute: tuple[str, ...], merge: tuple[str, ...] = (), concat: tuple[str, ...] = CONCATS
) -> Mapping[str, Role]:
    """Return roles: ops that move values are transparent, activations join the op before them, and others are as given."""
    roles: dict[str, Role] = dict.fromkeys(MOVES, "transparent")
    roles |= dict.fromkeys(ACTIVATIONS, "activation")
    roles |= dict.fromkeys(concat, "concat")
    roles |= dict.fromkeys(compute, "compute")
    roles |= dict.fromkeys(merge, "merge")
    return roles


_LAYERS = tuple(kind.name for kind in KINDS.values() if kind.layer)
# The ONNX ops that move values, but those that runtimes remove.
_MOVING = [kind for kind in KINDS.values() if (kind.moves or kind.concatenates) and not kind.returns_input]
_MOVING_OPS = tuple(name for kind in _MOVING for name in kind.onnx)
_PRODUCTS = (*_LAYERS, "matmul", "attention")
_ALL_PRODUCTS = (*_PRODUCTS, "dot_product_attention")
_ARITHMETIC = ("add", "sub", "mul", "div")
# On targets that compute in integers throughout.
_IN_INTEGERS = ("scale", "avg_pool", "mean", "upsample_linear", "batch_norm")

_SIGNED = QuantSpec(bits=8)
_NARROW = QuantSpec(bits=8, narrow=True)
_PER_CHANNEL = QuantSpec(bits=8, axis=0)
_AFFINE = QuantSpec(bits=8, signed=False, symmetric=False)
_POW2 = QuantSpec(bits=8, pow2_scale=True)
_LOGARITHMIC = QuantSpec(bits=8, format="nnie")

# TensorRT 11. Source: NVIDIA's documentation, "Working with Quantized Types": symmetric int8 in [-128, 127] and no unsigned
# codes, activations per tensor, weights per output channel, Q/DQ on the inputs of weighted ops, both of a matmul. In a
# residual add only the identity branch, so that convolution and add fuse. Max pooling commutes with quantization. Average
# pooling does not: like every op without weights (linear resizes too) it is quantized only together with its output. All
# inputs of a concat have one scale (NVIDIA Model Optimizer's ONNX rules). Other elementwise ops stay float: a gate times a
# convolution fuses without Q/DQ. Weights stay float with both nodes, which all its parsers read. Transposed convolutions:
# axis 1 from version 10 on. F.scaled_dot_product_attention stays float: an attention is fused in int8 only with Q/DQ after
# its softmax too (NVIDIA's documentation, "MHA fusion"; NVIDIA/TensorRT #2981), and inside of that one op there is none; in
# half precision it is fused as it stands. Attention of matrix products and a softmax has all of them. Networks are strongly
# typed: what the file has in float32 is computed in float32. A pair of float16 has a scale of float16 (ONNX, QuantizeLinear
# from opset 19 on). In float16 it computes a convolution and a SiLU in the form with a tanh as one op (ultralytics #26223).
TENSORRT = Backend(
    name="tensorrt",
    title="TensorRT 11, files in float16",
    qconfig=QConfig(activation=_SIGNED, weight=_PER_CHANNEL),
    roles=_roles(compute=(*_PRODUCTS, "avg_pool", "upsample_linear"), merge=("add",)),
    residual_add="identity",
    integer_weights=False,
    weight_bits=(8,),
    integers_in_and_out=True,
    joined_activations=tuple(kind for kind in ACTIVATIONS if kind != "hardswish"),
    advice=("few channels", "deconvolution"),
    runtime="tensorrt",
    float_type="float16",
    silu_form="tanh",
)

# TensorRT 10: the same rules. Its networks of weak types choose between float32 and float16 layer by layer (--fp16), so that
# a file in float32 leaves the choice to it.
TENSORRT10 = replace(TENSORRT, name="tensorrt10", title="TensorRT 10, files in float32", float_type="float32")

# TensorRT 11, transformers. Source: MQBench's Tensorrt_NLP: inputs of linear layers, matmuls and adds, except adds with a mask.
TENSORRT_NLP = replace(
    TENSORRT,
    name="tensorrt-nlp",
    title="TensorRT 11, transformers: linear layers, matmuls and adds alone",
    roles=_roles(compute=("linear", "matmul", "attention"), merge=("add",), concat=()),
)

# TensorRT 8: its kernels take the scales of a transposed convolution along axis 0 (NVIDIA/TensorRT #1694, #1699, #2380), and
# it rejects grouped ones (#1934).
TENSORRT8 = replace(
    TENSORRT10, name="tensorrt8", title="TensorRT 8", conv_transpose_axis=0, grouped_conv_transpose=False
)

# onnxruntime, QDQ format, CPU. Source: its documentation, "Quantize ONNX models": activations uint8 with a zero point,
# weights symmetric per channel. The file stores weights in uint8 with a zero point of 128 (U8U8): processors without VNNI add
# products of uint8 and int8 in 16 bits, which saturate (the same page, "When and why do I need to try U8U8?"). What
# follows was measured with 1.30 at its default optimization level (the table in docs/runtimes.md), and agrees with its
# selectors (onnxruntime/core/optimizer/qdq_transformer/selectors_actions/qdq_selectors.cc): QLinearConv, QLinearAdd,
# QLinearMul, QLinearAveragePool, QLinearSigmoid and QLinearLeakyRelu are fused only if their one output goes to a
# QuantizeLinear; QGemm and MatMulIntegerToFloat return floats too. Only those activations join that the saturation of a
# QuantizeLinear replaces. Transposed convolutions have no integer kernel, and between Q/DQ nodes onnxruntime quantizes the
# weight of a float one itself: the file has a convolution and a DepthToSpace instead, which run in integers. One that only
# outputs of the graph take is fastest without Q/DQ nodes. Linear resizes have no integer kernel either: between Q/DQ nodes
# they are slower than in float. F.scaled_dot_product_attention is written as products around a softmax, which run in float
# even between Q/DQ nodes. Ops with a constant stay float, because the constant has no quantizer. Biases are int32
# (core/optimizer/qdq_transformer/weight_bias_quantization.cc). Batch norms have no integer kernel: six of 512 channels after
# ReLUs took 4.4 of 10 ms, and 0.3 ms as depthwise convolutions.
ONNXRUNTIME = Backend(
    name="onnxruntime",
    title="onnxruntime on CPUs",
    qconfig=QConfig(activation=_AFFINE, weight=_PER_CHANNEL),
    roles=_roles(compute=(*_PRODUCTS, "embedding", "avg_pool", "sigmoid", "leaky_relu"), merge=("add", "mul")),
    needs_quantized_output=("conv", "conv_transpose", "add", "mul", "avg_pool", "sigmoid", "leaky_relu"),
    splits_silu=True,
    joined_activations=("relu", "relu6", "clamp"),
    repeated_pairs=_MOVING_OPS,
    sub_pixel=True,
    batch_norm_as_conv=True,
    weight_codes="uint8",
    integer_bias=True,
    runtime="onnxruntime",
)

# OpenVINO, CPU plugin. Sources: NNCF's table of quantizable operations (nncf/openvino/graph/metatypes/groups.py: layers,
# elementwise ops, pools, means, interpolation; concats with unified scales) and MQBench's OPENVINO backend: symmetric
# activations, unsigned where they are never negative. Weights have 7 bits, because sums of int8 products overflow 16 bits on
# AVX2 and AVX-512 without VNNI; NNCF's overflow fix does the same. F.scaled_dot_product_attention takes quantized inputs, as
# NNCF gives its query and key, and its softmax has no quantizer: measured with 2026.4 (docs/runtimes.md).
OPENVINO = Backend(
    name="openvino",
    title="OpenVINO on CPUs",
    qconfig=QConfig(activation=_SIGNED, weight=QuantSpec(bits=7, axis=0)),
    roles=_roles(compute=(*_ALL_PRODUCTS, "scale", "avg_pool", "mean", "upsample_linear"), merge=_ARITHMETIC),
    unsigned_after_relu=True,
    weight_bits=(7, 8),
    runtime="openvino",
)

# SNPE (Qualcomm) computes in integers throughout. Source: MQBench's SNPE scheme and TotalINT placement: uint8 with a zero point
# per tensor, weights too; inputs and outputs of every op, after ReLU and flatten; each concat input has its own encoding.
SNPE = Backend(
    name="snpe",
    title="SNPE (Qualcomm)",
    qconfig=QConfig(activation=_AFFINE, weight=_AFFINE),
    roles=_roles(compute=(*_ALL_PRODUCTS, *_IN_INTEGERS), merge=_ARITHMETIC),
    shared_concat=False,
    integer_bias=True,
    quantize_outputs=True,
    quantize_graph_outputs=True,
)

# QNN (Qualcomm's HTP, through onnxruntime's execution provider). Source: onnxruntime's documentation, "QNN Execution Provider":
# QDQ models with quantized inputs and outputs of every node, uint8 with a zero point per tensor for both (get_qnn_qdq_config's
# default). Normalizations and softmax have integer kernels too. Unlike MQBench's ONNX_QNN, Linear and deconvolution are
# quantized.
QNN = replace(
    SNPE,
    name="qnn",
    title="QNN (Qualcomm's HTP)",
    roles=_roles((*_ALL_PRODUCTS, *_IN_INTEGERS, "layer_norm", "instance_norm", "softmax"), merge=_ARITHMETIC),
)

# Vitis AI's DPU. Source: MQBench's Vitis scheme and Xilinx UG1414: int8 symmetric with power-of-two scales per tensor, for
# inputs, weights and outputs of all ops that the DPU computes.
VITIS = Backend(
    name="vitis",
    title="Vitis AI (Xilinx' DPU)",
    qconfig=QConfig(activation=_POW2, weight=_POW2),
    roles=_roles(compute=(*_LAYERS, *_IN_INTEGERS), merge=("add", "mul")),
    quantize_outputs=True,
    quantize_graph_outputs=True,
)

# PPL (OpenPPL on CUDA). Source: MQBench's PPLCUDA scheme and TotalINT placement: uint8 with a zero point, weights per channel.
PPL = replace(
    SNPE, name="ppl", title="OpenPPL on CUDA", qconfig=QConfig(activation=_AFFINE, weight=replace(_AFFINE, axis=0))
)

# PPL with activations of 16 bits. Source: MQBench's PPLW8A16: uint8 weights and uint16 activations with zero points.
PPL_W8A16 = replace(
    PPL,
    name="ppl-w8a16",
    title="OpenPPL on CUDA, activations of 16 bits",
    qconfig=QConfig(activation=replace(_AFFINE, bits=16), weight=_AFFINE),
)

# STPU (SenseTime). Source: MQBench's STPU scheme and TotalINT placement: int8 in [-127, 127] per tensor for weights too.
STPU = replace(SNPE, name="stpu", title="STPU (SenseTime)", qconfig=QConfig(activation=_NARROW, weight=_NARROW))

# Tengine, uint8. Source: MQBench's Tengine_u8: as SNPE, with concat, hardswish and sigmoid quantized as ops of their own.
TENGINE = replace(
    SNPE,
    name="tengine",
    title="Tengine",
    roles=_roles(compute=(*_LAYERS, *_IN_INTEGERS, "hardswish", "sigmoid"), merge=("add", "mul")),
)

# NNIE (HiSilicon) has a logarithmic grid. Source: MQBench's NNIE scheme: weights and activations logarithmic per tensor;
# inputs of layers, pools, batch norms, interpolations, adds and products; concats stay float.
NNIE = Backend(
    name="nnie",
    title="NNIE (HiSilicon)",
    qconfig=QConfig(activation=_LOGARITHMIC, weight=_LOGARITHMIC),
    roles=_roles(compute=(*_LAYERS, "avg_pool", "upsample_linear", "batch_norm"), merge=("add", "mul"), concat=()),
)

# TVM. Source: its pass that turns QDQ models into integer ops (FakeQuantizationToInteger,
# python/tvm/relay/transform/fake_quantization_to_integer.py): an op becomes an integer op between quantized inputs and a
# quantized output; reshapes, slices, max pools and nearest resizes keep the scale of their input; concats requantize each
# input.
TVM = Backend(
    name="tvm",
    title="TVM",
    qconfig=QConfig(activation=_SIGNED, weight=_PER_CHANNEL),
    roles=_roles(compute=(*_LAYERS, "scale", "matmul", "avg_pool", "mean"), merge=("add", "sub", "mul")),
    shared_concat=False,
    quantize_outputs=True,
    quantize_graph_outputs=True,
)

# XNNPACK, through ExecuTorch's delegate. Source: its partitioner (executorch 1.5, backends/xnnpack/partition/config):
# activations int8 with a zero point, weights symmetric in [-127, 127] (xnnpack_quantizer.py), for transposed convolutions
# along the output channels. It takes a layer, sum, difference, product or global mean in integers only if one quantize op takes
# its output, after a ReLU or ReLU6 at most. A layer without one is not delegated: the runtime's own kernels, which are slow,
# dequantize its weight at each run. Average pools over windows, linear resizes and other activations are float. Biases are
# int32 in steps of input scale times weight scale.
XNNPACK = Backend(
    name="xnnpack",
    title="ExecuTorch with XNNPACK",
    qconfig=QConfig(activation=replace(_AFFINE, signed=True), weight=replace(_PER_CHANNEL, narrow=True)),
    roles=_roles(compute=(*_LAYERS, "avg_pool", "mean"), merge=("add", "sub", "mul")),
    grouped_conv_transpose=False,
    needs_quantized_output=(*_LAYERS, "avg_pool", "mean", "add", "sub", "mul"),
    joined_activations=("relu", "relu6"),
    quantize_graph_outputs=True,
    integer_bias=True,
    runtime="xnnpack",
)

# LiteRT (TensorFlow Lite). Source: its 8-bit quantization specification (ai.google.dev/edge/litert/conversion/tensorflow/
# quantization/quantization_spec): activations int8 with a zero point, weights int8 in [-127, 127] per output channel, biases
# int32 in steps of input scale times weight scale. Pools, resizes, concats and what moves values have one grid for inputs and
# output. Softmax, logistic and tanh have fixed grids. An op computes in integers where all its inputs and its output are
# quantized, after a ReLU or ReLU6, or a clip that the saturation of its output is too. Transposed convolutions have no groups.
_LITERT_OPS = (*_LAYERS, "matmul", "avg_pool", "mean", "upsample_linear", "softmax", "sigmoid", "tanh", "leaky_relu",
               "hardswish", "gelu", "abs")  # fmt: skip
_LITERT_MERGES = ("add", "sub", "mul")
# Activations without an integer kernel.
_FLOAT_IN_LITERT = ("prelu", "elu", "mish", "hardsigmoid", "softplus")


def _fixed(low: float, high: float) -> QuantSpec:
    return replace(_AFFINE, signed=True, observer="constant", observer_args={"low": low, "high": high})


# A SiLU is a logistic and a product.
LITERT = Backend(
    name="litert",
    title="LiteRT (TensorFlow Lite)",
    qconfig=QConfig(activation=replace(_AFFINE, signed=True), weight=replace(_PER_CHANNEL, narrow=True)),
    roles={**_roles(compute=_LITERT_OPS, merge=_LITERT_MERGES), **dict.fromkeys(_FLOAT_IN_LITERT, "float")},
    grouped_conv_transpose=False,
    needs_quantized_output=(*_LITERT_OPS, *_LITERT_MERGES),
    splits_silu=True,
    joined_activations=("relu", "relu6", "clamp"),
    quantize_outputs=True,
    quantize_graph_outputs=True,
    integer_bias=True,
    same_grid=("avg_pool", "upsample_linear"),
    output_specs={"softmax": _fixed(0, 255 / 256), "sigmoid": _fixed(0, 255 / 256), "tanh": _fixed(-1, 127 / 128)},
    runtime="xnnpack",
)

# LiteRT with activations of 16 bits. Source: the same specification and its kernels: int16 without zero points, biases int64,
# softmax, logistic and tanh in steps of 1/32768. Hard swish, GELU and the delegate XNNPACK have no int16.
_OF_16_BITS = QuantSpec(bits=16, observer="constant", observer_args={"low": -32767 / 32768, "high": 32767 / 32768})
LITERT_16X8 = replace(
    LITERT,
    name="litert-16x8",
    title="LiteRT, activations of 16 bits",
    qconfig=QConfig(activation=QuantSpec(bits=16), weight=LITERT.qconfig.weight),
    roles={**LITERT.roles, "hardswish": "float", "gelu": "float"},
    output_specs=dict.fromkeys(LITERT.output_specs, _OF_16_BITS),
    runtime=None,
)

# The setting of papers. Source: MQBench's Academic: inputs and weights of convolutions and linear layers only, the first and
# the last layer in 8 bits. A global rule sets the widths of the others.
ACADEMIC = Backend(
    name="academic",
    title="the setting of papers",
    qconfig=QConfig(activation=_SIGNED, weight=_PER_CHANNEL),
    roles=_roles(compute=_LAYERS, concat=()),
    unsigned_after_relu=True,
    end_bits=8,
)

# The setting of papers on transformers. Source: MQBench's Academic_NLP: inputs of linear layers and matmuls; no
# minimum for the first and last layers.
ACADEMIC_NLP = replace(
    ACADEMIC,
    name="academic-nlp",
    title="the setting of papers on transformers",
    roles=_roles(compute=("linear", "matmul", "attention", "dot_product_attention"), concat=()),
    end_bits=None,
)

_ALL = (
    TENSORRT, TENSORRT10, TENSORRT8, TENSORRT_NLP, ONNXRUNTIME, OPENVINO, SNPE, QNN, VITIS, PPL, PPL_W8A16, STPU, TENGINE,
    NNIE, TVM, XNNPACK, LITERT, LITERT_16X8, ACADEMIC, ACADEMIC_NLP,
)  # fmt: skip
backends: Mapping[str, Backend] = {backend.name: backend for backend in _ALL}
# What other names of targets mean here.
MEANT = {
    **dict.fromkeys(("ort", "onnx", "x86", "fbgemm", "onednn", "cpu"), "onnxruntime"),
    **dict.fromkeys(("qnnpack", "executorch"), "xnnpack"),
    **dict.fromkeys(("tflite", "tensorflow_lite"), "litert"),
    **dict.fromkeys(("trt", "cuda", "gpu", "tensorrt11", "trt11"), "tensorrt"),
    "trt10": "tensorrt10",
    **dict.fromkeys(("tensorrt9", "trt9", "trt8"), "tensorrt8"),
    "ov": "openvino",
}


def backend_of(backend: str | Backend, required: str = "backend is required") -> Backend:
    """Return a backend by its name; a Backend is returned as it is.

    Raises:
        TypeError: The argument was left out. The sentence begins with `required`, and lists the targets.
        ValueError: The name is unknown. The sentence has the nearest one.

    Example:
        >>> backend_of("tensorrt") is qt.backends["tensorrt"]
        True
        >>> backend_of(REQUIRED)
        Traceback (most recent call last):
        ...
        TypeError: backend is required: it is the target that the model is deployed to. Name it, as in backend="onnxruntime"...
    """
    if isinstance(backend, Backend):
        return backend
    if backend == REQUIRED:
        targets = "\n".join(f"  {name:<14}{target.title}" for name, target in backends.items())
        raise TypeError(
            f'{required}: it is the target that the model is deployed to. Name it, as in backend="onnxruntime". The '
            f"targets are:\n{targets}"
        )
    if not isinstance(backend, str):
        raise TypeError(f"backend must be a name or a qtoolkit.Backend, got {shown(backend)}.")
    check_known("backend", backend, backends, MEANT)
    return backends[backend]
