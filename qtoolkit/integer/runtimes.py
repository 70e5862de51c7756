"""The runtimes whose arithmetic `qtoolkit.convert(arithmetic="integer")` reproduces: which op has which integer kernel."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import fx

from qtoolkit.errors import check_known, with_article
from qtoolkit.integer import onnxruntime, openvino, tensorrt, xnnpack
from qtoolkit.integer.kernels import LayerKernel, OpKernel
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.op_kinds.kind import OpKind
from qtoolkit.quantizers.frozen import Grid


@dataclass(frozen=True)
class Runtime:
    """How one runtime executes a quantized model.

    Attributes:
        name: Its name.
        carries: The kinds of op through which codes pass on their way to an integer kernel.
        absorbs: The kinds of activation that a kernel computes by saturation: their bounds are at or beyond its range of codes.
        layer_kernel: Returns the kernel of a layer (its input's grid and its output's, or None), or why it runs in float.
        op_kernel: Returns the kernel of another op (its kind, its node, the kinds of the ops that take its output, its
            inputs' grids, its output's, or None), or why it runs in float.
        reciprocal: Whether quantizing multiplies by a factor from the ends of the range, and adds the zero point before
            rounding.
    """

    name: str
    carries: tuple[str, ...]
    absorbs: tuple[str, ...]
    layer_kernel: Callable[[QuantWeighted, Grid, Grid | None], type[LayerKernel] | str]
    op_kernel: Callable[[str, fx.Node, Collection[OpKind], Sequence[Grid], Grid | None], type[OpKernel] | str]
    reciprocal: bool = False


def _float_op(runtime: str, kind: str, *_: object) -> str:
    """Return why an op without weights stays float on a runtime that computes it as its float form does."""
    return f"{runtime} computes {with_article(kind)} in float32 between codes"


RUNTIMES: Mapping[str, Runtime] = {
    "onnxruntime": Runtime(
        "onnxruntime",
        carries=onnxruntime.CARRIES,
        absorbs=onnxruntime.ABSORBS,
        layer_kernel=onnxruntime.layer_kernel,
        op_kernel=onnxruntime.op_kernel,
    ),
    "openvino": Runtime(
        "openvino",
        carries=openvino.CARRIES,
        absorbs=(),
        layer_kernel=openvino.layer_kernel,
        op_kernel=partial(_float_op, "OpenVINO"),
        reciprocal=True,
    ),
    "tensorrt": Runtime(
        "tensorrt",
        carries=tensorrt.CARRIES,
        absorbs=(),
        layer_kernel=tensorrt.layer_kernel,
        op_kernel=partial(_float_op, "TensorRT"),
    ),
    "xnnpack": Runtime(
        "xnnpack",
        carries=xnnpack.CARRIES,
        absorbs=xnnpack.ABSORBS,
        layer_kernel=xnnpack.layer_kernel,
        op_kernel=xnnpack.op_kernel,
    ),
}


def runtime_named(name: str) -> Runtime:
    """Return a runtime by its name.

    Raises:
        ValueError: The name is not known.
    """
    check_known("runtime", name, RUNTIMES)
    return RUNTIMES[name]
