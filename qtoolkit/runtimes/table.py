"""One record of each runtime: its integer kernels, how it executes a file, which differences are its rounding, its rules."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from typing import Literal

from torch import fx

from qtoolkit.backends import Backend
from qtoolkit.errors import with_article
from qtoolkit.extras import missing
from qtoolkit.integer import litert, onnxruntime, openvino, tensorrt, xnnpack
from qtoolkit.integer.kernels import LayerKernel, OpKernel
from qtoolkit.nn.refusals import refusal_of
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.ops.requantize import fake_quant_away, fake_quant_by_factor, fake_quant_by_reciprocal
from qtoolkit.quantizers.capability import NO_CODES
from qtoolkit.quantizers.frozen import Grid, QuantizesAs
from qtoolkit.runtimes.execution import Execute, Executed, ExecutionRequest
from qtoolkit.verdicts import Cause, Refusal

RuntimeName = Literal["onnxruntime", "openvino", "tensorrt", "xnnpack", "litert"]
ExecutingRuntime = Literal["onnxruntime", "openvino"]  # those that run an ONNX file here
LitertRuntime = Literal["litert", "litert-xnnpack"]  # those that run a LiteRT file


@dataclass(frozen=True)
class Runtime:
    """How one runtime executes a quantized model."""

    name: str  # its name
    carries: tuple[str, ...]  # the kinds of op through which integers pass on their way to an integer kernel
    # returns the kernel of a layer with integer sums (its input's grid and its output's, or None), or why it runs in float.
    # Callers take `kernel_of`
    layer_kernel: Callable[[QuantWeighted, Grid, Grid | None], type[LayerKernel] | Refusal]
    # returns the kernel of another op (its kind, its node, the kinds of the ops that take its output, its inputs' grids, its
    # output's, or None), or why it runs in float
    op_kernel: Callable[[str, fx.Node, Collection[OpKind], Sequence[Grid], Grid | None], type[OpKernel] | Refusal]
    # the kinds of activation that a kernel computes by saturation: their bounds are at or beyond its integer range
    absorbs: tuple[str, ...] = ()
    # whether a kernel computes a ReLU after it at the zero point, wherever that lies in the range
    clips_at_zero: bool = False
    picks: bool = False  # whether integers pass through x[0] too
    # how it quantizes floats, where it rounds otherwise than `fake_quant` (`Grid.quantizes_as`)
    quantizes_as: QuantizesAs | None = None
    package: str = ""  # the package that executes files; "" where none does
    extra: str = ""  # the extra of qtoolkit that installs it
    execute: Execute | None = None  # runs an ONNX file; None where it takes none. It imports the package
    # the share of quantized values that may differ from a model's, by one step each, because ops that the runtime computes
    # in float round in another order
    tie_share: float = 0.0
    rules: str = ""  # where the rules are documented by which `qtoolkit.export.lint` checks its files

    def kernel_of(self, layer: QuantWeighted, source: Grid, output: Grid | None) -> type[LayerKernel] | Refusal:
        """Return the kernel of a layer (see `layer_kernel`), or why it runs in float: by the rules of all runtimes first."""
        weight = NO_CODES if layer.weight_quantizer is None else layer.weight_quantizer.capability_now
        return refusal_of(layer, weight, source.capability_now) or self.layer_kernel(layer, source, output)

    def runs(self, backend: Backend) -> bool:
        """Return whether a target has this runtime's arithmetic."""
        return backend.runtime == self.name

    @property
    def is_installed(self) -> bool:
        """Whether the package that executes files is installed."""
        return bool(self.package) and find_spec(self.package) is not None

    def check_installed(self, what: str) -> None:
        """Raise ImportError, which begins with `what` and has the command that installs it, where it is missing."""
        if not self.is_installed:
            raise missing(what, self.package, self.extra)


def _float_op(runtime: str, kind: str, *_: object) -> Refusal:
    """Return why an op without weights stays float on a runtime that computes it as its float form does."""
    return Refusal(
        Cause.NO_KERNEL, f"{runtime} computes {with_article(kind)} in float32 between integer inputs and outputs"
    )


def _in_onnxruntime(*request: *ExecutionRequest) -> Executed:
    from qtoolkit.export.verification.runtimes.onnxruntime_cpu import execute

    return execute(*request)


def _in_openvino(*request: *ExecutionRequest) -> Executed:
    from qtoolkit.export.verification.runtimes.openvino_cpu import execute

    return execute(*request)


ONNXRUNTIME = Runtime(
    "onnxruntime",
    onnxruntime.CARRIES,
    onnxruntime.layer_kernel,
    onnxruntime.op_kernel,
    absorbs=onnxruntime.ABSORBS,
    package="onnxruntime",
    extra="onnx",
    execute=_in_onnxruntime,
    tie_share=1e-5,
    rules="onnxruntime qdq_selectors.cc; measured with 1.30, docs/runtimes.md",
)

# Its kernels add the bias in float, and multiply by the scales in another order than onnxruntime's.
OPENVINO = Runtime(
    "openvino",
    openvino.CARRIES,
    openvino.layer_kernel,
    partial(_float_op, "OpenVINO"),
    quantizes_as=fake_quant_by_factor,
    package="openvino",
    extra="openvino",
    execute=_in_openvino,
    tie_share=1e-4,
    rules="OpenVINO CPU plugin, low precision transformations",
)

TENSORRT = Runtime(
    "tensorrt",
    tensorrt.CARRIES,
    tensorrt.layer_kernel,
    partial(_float_op, "TensorRT"),
    rules="TensorRT documentation, Working with Quantized Types",
)

# ExecuTorch's delegate, which executes programs of its own (`qtoolkit.export.verification.runtimes.executorch_xnnpack`).
XNNPACK = Runtime(
    "xnnpack",
    xnnpack.CARRIES,
    xnnpack.layer_kernel,
    xnnpack.op_kernel,
    absorbs=xnnpack.ABSORBS,
    quantizes_as=fake_quant_by_reciprocal,
    package="executorch",
    extra="executorch",
    tie_share=1e-5,
)

# LiteRT's reference kernels, which microcontrollers run. The share is for a model in float arithmetic: they round twice
# after a sum.
LITERT = Runtime(
    "litert",
    litert.CARRIES,
    litert.layer_kernel,
    litert.op_kernel,
    absorbs=litert.ABSORBS,
    clips_at_zero=True,
    quantizes_as=fake_quant_away,
    picks=True,
    package="ai_edge_litert",
    extra="litert",
    tie_share=1e-2,
)

RUNTIMES: Mapping[str, Runtime] = {each.name: each for each in (ONNXRUNTIME, OPENVINO, TENSORRT, XNNPACK, LITERT)}
# How each runtime executes an ONNX file, by its name.
EXECUTES: Mapping[str, Execute] = {name: each.execute for name, each in RUNTIMES.items() if each.execute is not None}

# LiteRT with its reference kernels, and with the delegate that it takes on the CPU. They execute files of their own
# (`qtoolkit.export.verification.runtimes.litert_interpreter`).
LITERT_RUNTIMES: Mapping[str, Runtime] = {
    "litert": LITERT,
    "litert-xnnpack": replace(XNNPACK, name="litert-xnnpack", package=LITERT.package, extra=LITERT.extra),
}
