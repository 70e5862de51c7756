"""lint() and estimate_engine(): rule violations and speed estimates for ONNX files with Q/DQ pairs, written by any tool."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qtoolkit.backends import Backend, backend_of
from qtoolkit.errors import check_flags, check_known
from qtoolkit.export.files.reading import UnreadableFileError, open_graph
from qtoolkit.lint.codes import CODES
from qtoolkit.lint.engine import GPUS, Cost, GpuName, costs_of
from qtoolkit.lint.findings import Finding, GraphRule, LintRule, broken
from qtoolkit.lint.fusions import FILE_ADVICE, FUSIONS
from qtoolkit.lint.layers import ADVICE, LAYERS
from qtoolkit.lint.ops import Op
from qtoolkit.lint.placement import PLACEMENT
from qtoolkit.lint.slower import SLOWER, takes_types_as_they_are

FILE_RULES = (*PLACEMENT, *LAYERS, *CODES, *FUSIONS)
SLOW_RULES = ("inside-a-unit", "silu", "cast")  # of them, those that cost speed alone


def lint(path: str | os.PathLike[str], backend: str | Backend, advice: bool = False) -> tuple[Finding, ...]:
    """Check the Q/DQ nodes of an ONNX file against the rules of a target.

    The file may come from any tool. The bodies of If, Loop and Scan are checked as separate graphs with float inputs.
    `rules_of` lists the rules.

    Args:
        path: The file.
        backend: The target: a name in `qt.backends`, or a Backend.
        advice: Also list nodes that the target computes, but no faster than in float (for "tensorrt": than in float16).

    Returns:
        One finding for each node that violates a rule, in the order of the file, with the rule's name, its source and a remedy.

    Raises:
        ValueError: The backend is unknown; or, as `UnreadableFileError`, the file is not ONNX, is truncated or invalid, has ops
            that ONNX does not know, lacks its external weights, or has no Q/DQ nodes.
        ImportError: onnx or onnxscript is not installed.

    Example:
        >>> import tempfile
        >>> model, images = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), [torch.rand(8, 3, 8, 8)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.quantize(model, images, "tensorrt", folder + "/model.onnx")
        ...     found = qt.export.lint(result.export.path, "tensorrt")
        >>> found
        ()
    """
    check_flags("lint", advice=advice)
    backend = backend_of(backend)
    ops = quantized_ops(path, with_sizes=advice and takes_types_as_they_are(backend))
    return broken(rules_of(backend, advice), ops, backend)


def rules_of(backend: Backend, advice: bool = False) -> tuple[LintRule | GraphRule, ...]:
    """Return the rules that `lint` checks for a target.

    Example:
        >>> "residual-add" in [rule.name for rule in rules_of(qt.backends["tensorrt"])]
        True
    """
    given = _advice_of(backend) if advice else ()
    return tuple(rule for rule in (*FILE_RULES, *given) if rule.applies(backend))


def _advice_of(backend: Backend) -> tuple[LintRule | GraphRule, ...]:
    return (*(ADVICE[name] for name in backend.advice), *FILE_ADVICE, *SLOWER)


@dataclass(frozen=True)
class EngineEstimate:
    """The result of `estimate_engine`; str() gives a short report.

    Attributes:
        path: The file.
        gpu: The GPU.
        findings: Nodes that are no faster than in float16, each with its source and a remedy.
        types: Multiplications and memory traffic in "int8", "float16" and "float32".
        seconds: The estimated time of one inference.
        float16_seconds: The estimated time of the same model in float16, without quantizers.
        unknown: The number of tensors that are left out because their sizes are unknown.
    """

    path: str
    gpu: GpuName
    findings: tuple[Finding, ...]
    types: Mapping[str, Cost]
    seconds: float
    float16_seconds: float
    unknown: int = 0

    @property
    def headline(self) -> str:
        """Both times and their ratio, in one sentence."""
        if not (self.seconds and self.float16_seconds):
            return "The sizes of the file's tensors are unknown, so no time can be estimated."
        ratio = self.seconds / self.float16_seconds
        return (
            f"Estimated on {self.gpu}: {self.seconds * 1e6:.4g} us, and {self.float16_seconds * 1e6:.4g} us in float16: "
            f"{abs(1 - ratio):.0%} {'slower' if ratio > 1 else 'faster'}."
        )

    def __str__(self) -> str:
        lines = [self.headline]
        lines += [f"{name}: {cost}" for name, cost in self.types.items()]
        lines += [f"{self.unknown} tensors of unknown size are left out"] if self.unknown else []
        return "\n".join([*lines, *map(str, self.findings)])


def estimate_engine(
    path: str | os.PathLike[str], backend: str | Backend = "tensorrt", gpu: GpuName = "A100"
) -> EngineEstimate:
    """Estimate the speed of a TensorRT engine for an ONNX file with Q/DQ pairs, compared with float16, and list slow nodes.

    The estimate is a roofline model: a kernel's time is its multiplications at the peak rate of their type, or its memory
    traffic at the bandwidth of the GPU, whichever is longer (`qtoolkit.lint.engine`). Real kernels reach neither peak, and each
    launch takes some microseconds. Nothing is measured: use the estimate to compare variants, and measure before you decide.
    Dynamic sizes count as 1.

    Args:
        path: The ONNX file, written by any tool.
        backend: The target; it must compute in the types of the file.
        gpu: "H100", "A100", "L4", "T4", "Orin" or "RTX4090", with the peaks of NVIDIA's data sheets.

    Returns:
        The times, the multiplications and memory traffic per type, and the findings.

    Raises:
        ValueError: The GPU or the backend is unknown, or the backend chooses types by itself; or, as `UnreadableFileError`, the
            file cannot be read or has no Q/DQ nodes.
        ImportError: onnx or onnxscript is not installed.

    Example:
        >>> import tempfile
        >>> model, images = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()), [torch.rand(8, 3, 8, 8)]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.quantize(model, images, "tensorrt10", folder + "/model.onnx")
        ...     estimate = qt.export.estimate_engine(result.export.path, "tensorrt", "L4")
        >>> [finding.name for finding in estimate.findings], estimate.types["int8"].macs
        (['float32-floats', 'first-layer'], 7776)
    """
    backend = backend_of(backend)
    check_known("gpu of estimate_engine:", gpu, GPUS)
    if not takes_types_as_they_are(backend):
        raise ValueError(
            "estimate_engine: backend must be a target that computes in the types of a file, such as 'tensorrt'; "
            f"{backend.name!r} chooses types by itself."
        )
    return estimate_ops(path, quantized_ops(path, with_sizes=True), backend, gpu)


def estimate_ops(path: str | os.PathLike[str], ops: Sequence[Op], backend: Backend, gpu: GpuName) -> EngineEstimate:
    """Return the estimate of `estimate_engine` for the ops of a file, with their sizes."""
    rules = [rule for rule in FILE_RULES if rule.name in SLOW_RULES]
    findings = broken((*rules, *_advice_of(backend)), ops, backend)
    costs, plain = (costs_of(ops, backend, GPUS[gpu], in_float16) for in_float16 in (False, True))
    return EngineEstimate(str(path), gpu, findings, costs.of_types, costs.seconds, plain.seconds, costs.unknown)


def quantized_ops(path: str | os.PathLike[str], with_sizes: bool) -> Sequence[Op]:
    """Return the ops of a file, with the sizes of all tensors if asked; UnreadableFileError for a file without Q/DQ nodes."""
    from qtoolkit.export.files.ops import ops_of
    from qtoolkit.export.files.sizes import infer_sizes

    model = open_graph(path)
    kinds = {node.op_type for node in model.graph.all_nodes()}
    if not kinds.intersection(("QuantizeLinear", "DequantizeLinear")):
        raise UnreadableFileError(
            f"{str(path)!r} has no QuantizeLinear and no DequantizeLinear node: it is a float model, or uses another format "
            "than QDQ. Quantize it, and export it in the QDQ format."
        )
    if with_sizes:
        infer_sizes(model)
    return ops_of(model)
