"""lint(): which nodes of a file with Q/DQ pairs, of any tool, break a rule of a target; and how fast its engine may be."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qtoolkit.backends import Backend, backend_of
from qtoolkit.errors import check_flags, check_known
from qtoolkit.export.files.reading import UnreadableFileError, open_graph
from qtoolkit.lint.codes import CODES
from qtoolkit.lint.engine import GPUS, Cost, GpuName, costs_of
from qtoolkit.lint.findings import Finding, GraphRule, LintRule, broken
from qtoolkit.lint.fusions import FILE_ADVICE, FUSIONS
from qtoolkit.lint.layers import ADVICE, LAYERS
from qtoolkit.lint.placement import PLACEMENT
from qtoolkit.lint.slower import SLOWER, takes_types_as_they_are

if TYPE_CHECKING:
    import onnx_ir

FILE_RULES = (*PLACEMENT, *LAYERS, *CODES, *FUSIONS)
SLOW_RULES = ("inside-a-unit", "silu", "cast")  # of them, those that cost speed alone


def lint(path: str | os.PathLike[str], backend: str | Backend, advice: bool = False) -> tuple[Finding, ...]:
    """Check the Q/DQ nodes of an ONNX file against the rules of a target.

    The file may come from any tool. The bodies of If, Loop and Scan are checked as graphs of their own, which take floats from
    outside. `rules_of` lists the rules.

    Args:
        path: The file.
        backend: The target: a name in `qt.backends`, or a Backend.
        advice: Also list what the target computes, and no faster than in float (for "tensorrt", than in float16).

    Returns:
        One finding for each node that breaks a rule, in the order of the file, with the rule's name, its source and a remedy.

    Raises:
        ValueError: The backend is not known; or, as `UnreadableFileError`, the file is not ONNX, is truncated or invalid, has
            ops that ONNX does not know, lacks the file of its weights, or has no Q/DQ nodes.
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
    return lint_graph(quantized_graph(path), backend, advice)


def lint_graph(model: "onnx_ir.Model", backend: Backend, advice: bool) -> tuple[Finding, ...]:
    """Return what `lint` does, of a file that is open."""
    from qtoolkit.export.files.ops import ops_of
    from qtoolkit.export.files.sizes import infer_sizes

    if advice and takes_types_as_they_are(backend):
        infer_sizes(model)
    return broken(rules_of(backend, advice), ops_of(model), backend)


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
    """What `estimate_engine` returns. It prints as a few lines.

    Attributes:
        path: The file.
        gpu: The GPU.
        findings: Why the engine is no faster than one in float16, each with its source and a remedy.
        types: What the engine computes and moves in "int8", "float16" and "float32".
        seconds: The estimated time of an inference.
        float16_seconds: That of the same model without quantizers, in float16.
        unknown: How many tensors have sizes that are not known, and are left out.
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
        """A sentence with both times, and with the ratio."""
        if not (self.seconds and self.float16_seconds):
            return "The sizes of the file's tensors are not known, so that no time can be estimated."
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
    """Estimate how fast an engine of an ONNX file with Q/DQ pairs is, beside one in float16, and say why it is no faster.

    The estimate is a roofline: each kernel takes as long as its products at the peak of their type, or as its tensors at the
    bandwidth of the GPU, whichever is longer (`qtoolkit.lint.engine`). Real kernels reach neither peak, and each takes some
    microseconds to start. Nothing was measured: compare by it, and measure before you decide. Sizes that vary count as 1.

    Args:
        path: The file, of any tool.
        backend: The target, whose networks take the types of the file as they are.
        gpu: "H100", "A100", "L4", "T4", "Orin" or "RTX4090", with the peaks of NVIDIA's data sheets.

    Returns:
        The times, what is computed and moved in each type, and the findings.

    Raises:
        ValueError: The GPU or the backend is not known, the backend chooses types by itself; or, as `UnreadableFileError`, the
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
            f"estimate_engine: backend must be a target that computes in the types of a file, such as 'tensorrt'; "
            f"{backend.name!r} chooses them by itself."
        )
    return estimate_graph(path, quantized_graph(path), backend, gpu)


def estimate_graph(
    path: str | os.PathLike[str], model: "onnx_ir.Model", backend: Backend, gpu: GpuName
) -> EngineEstimate:
    """Return what `estimate_engine` does, of a file that is open."""
    from qtoolkit.export.files.ops import ops_of
    from qtoolkit.export.files.sizes import infer_sizes

    infer_sizes(model)
    ops = ops_of(model)
    rules = [rule for rule in FILE_RULES if rule.name in SLOW_RULES]
    findings = broken((*rules, *_advice_of(backend)), ops, backend)
    costs, plain = (costs_of(ops, backend, GPUS[gpu], in_float16) for in_float16 in (False, True))
    return EngineEstimate(str(path), gpu, findings, costs.of_types, costs.seconds, plain.seconds, costs.unknown)


def quantized_graph(path: str | os.PathLike[str]) -> "onnx_ir.Model":
    """Open a file; UnreadableFileError for one without Q/DQ nodes."""
    model = open_graph(path)
    kinds = {node.op_type for node in model.graph.all_nodes()}
    if not kinds.intersection(("QuantizeLinear", "DequantizeLinear")):
        raise UnreadableFileError(
            f"{str(path)!r} has no QuantizeLinear and no DequantizeLinear node: it is a float model, or its integer ops are "
            f"written in another form. Quantize it, and write it in the QDQ format."
        )
    return model
