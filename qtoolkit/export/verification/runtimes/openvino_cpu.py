"""OpenVINO on the CPU, at its default settings.

The quantized values come from the outputs of each DequantizeLinear, which a second compilation returns. These outputs prevent
some fusions, so late quantized values may differ from the plain graph by rounding ties: `Executed.changed_by_reading` is the
effect on the outputs.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qtoolkit.export.files.files import OpenedFile
from qtoolkit.export.files.quantizer_nodes import QuantizerNode, layer_names
from qtoolkit.export.verification.codes import largest_difference
from qtoolkit.export.verification.runtimes.saturating_sums import has_wide_weights, processor_saturates
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.runtimes.execution import Executed, ExecutedLayer
from qtoolkit.runtimes.table import OPENVINO

if TYPE_CHECKING:
    import openvino

# Nodes that do not compute.
PLUMBING = ("Const", "Input", "Output", "Reorder", "Reshape", "Transpose", "Split", "Convert")
SATURATES = (
    "Without VNNI, as on this processor, OpenVINO's sums of uint8 times int8 products saturate at 16 bits, and this file has "
    "integer weights beyond 64: use the backend 'openvino', which quantizes weights to 7 bits."
)

# Source: its CPU plugin, Convolution::setPostOps ("drop rounding one special residual pattern").
UNROUNDED = (
    "OpenVINO does not round at {}: it fuses this convolution with an add and the quantizer of the sum. It rounds only if "
    "intermediate values are read."
)


@cache
def core() -> "openvino.Core":
    """Return OpenVINO's Core: one for the whole life of the process.

    The CPU plugin of each Core installs its own signal stack. After two Cores are deleted, the process may keep a freed stack,
    so that Ctrl-C, or the end of a data loader's process, causes a segmentation fault (OpenVINO 2026.4).
    """
    import openvino

    return openvino.Core()


def execute(
    path: Path, inputs: Sequence[Tensor], nodes: Sequence[QuantizerNode], grids: Mapping[str, Grid], _: bool = True
) -> Executed:
    """Run a file, and return the quantized values at its quantizers. OpenVINO has no public setting to disable optimizations.

    Raises RuntimeError: OpenVINO cannot run the file.
    """
    arrays = [x.detach().cpu().numpy() for x in inputs]
    plain = _compiled_with(path, ())[0]
    outputs = list(plain(arrays).values())
    read = {node.values: node for node in nodes}
    reading, names = _compiled_with(path, tuple(read))
    values = reading(arrays)
    results = list(values.values())
    found = ((read[name], torch.tensor(values[name])) for name in names)
    codes = {node.codes: grids[node.quantizer].codes(x).numpy() for node, x in found}
    file = OpenedFile.of(path)
    labels = layer_names(file.proto.graph)
    layers, conversions = _layers(plain, labels)
    change = largest_difference(outputs, results[: len(outputs)])
    saturates = processor_saturates() and has_wide_weights(file)  # which reads all weights
    saturating = tuple(layer.name for layer in layers if layer.integer and saturates)
    remarks = [SATURATES] if saturating else []
    unrounded = _unrounded(plain, nodes)
    if unrounded:
        remarks.append(UNROUNDED.format(", ".join(map(repr, unrounded))))
    facts = (codes, layers, conversions, change, OPENVINO.tie_share, " ".join(remarks), unrounded)
    return Executed(_description(plain), outputs, *facts, saturating=saturating)


def _compiled_with(path: Path, tensors: Sequence[str]) -> tuple["openvino.CompiledModel", list[str]]:
    """Compile a file that also returns these tensors; return the tensors that exist."""
    try:
        model = core().read_model(str(path))
        there = {name for op in model.get_ops() for output in op.outputs() for name in output.get_names()}
        names = [name for name in tensors if name in there]
        if names:
            model.add_outputs(names)
        return core().compile_model(model, "CPU"), names
    except RuntimeError as error:
        raise RuntimeError(f"verify: OpenVINO cannot run {str(path)!r} on the CPU: {str(error).strip()}") from error


def _description(compiled: "openvino.CompiledModel") -> str:
    """Return the version, and the type of float ops if it is not float32: bfloat16 on processors that support it."""
    import openvino

    version = openvino.get_version().partition("-")[0]
    precision = compiled.get_property("INFERENCE_PRECISION_HINT")
    return f"openvino {version}" + (
        "" if precision == openvino.Type.f32 else f" (float ops in {precision.to_string()})"
    )


def _unrounded(compiled: "openvino.CompiledModel", nodes: Sequence[QuantizerNode]) -> tuple[str, ...]:
    """Return the quantizers that OpenVINO skips because a kernel also includes a later quantizer."""
    quantizers = {node.quantize: node.quantizer for node in nodes if node.quantize}
    found = []
    for _, facts in _executed_nodes(compiled):
        found += [quantizers[name] for name in _fused(facts) if name in quantizers][:-1]
    return tuple(found)


def _layers(compiled: "openvino.CompiledModel", labels: Mapping[str, str]) -> tuple[tuple[ExecutedLayer, ...], int]:
    """Return the compute nodes, and the number of conversions."""
    layers, conversions = [], 0
    for name, facts in _executed_nodes(compiled):
        kernel, integer = facts["layerType"], facts["runtimePrecision"] in ("u8", "i8")
        if kernel in ("FakeQuantize", "Convert"):
            conversions += 1
        elif kernel not in PLUMBING:
            sources = [labels[fused] for fused in _fused(facts) if fused in labels]
            layers.append(ExecutedLayer(sources[0] if sources else name, kernel, integer))
    return tuple(layers), conversions


def _executed_nodes(compiled: "openvino.CompiledModel") -> Iterator[tuple[str, Mapping[str, str]]]:
    """Return the name and the runtime information of each node that OpenVINO executes."""
    for op in compiled.get_runtime_model().get_ordered_ops():
        yield op.get_friendly_name(), {key: value.astype(str) for key, value in op.get_rt_info().items()}


def _fused(facts: Mapping[str, str]) -> list[str]:
    """Return the names of the file's nodes that an executed node includes."""
    return facts["originalLayersNames"].split(",")
