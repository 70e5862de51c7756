"""export_onnx(): write a model as an ONNX file with QuantizeLinear/DequantizeLinear pairs, after verification."""

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import nn

from qtoolkit.backends import REQUIRED, Backend, backend_of
from qtoolkit.config.formats import FloatType, WeightCodes
from qtoolkit.eager.record import backend_in
from qtoolkit.errors import check_flags, check_known, some, warn
from qtoolkit.export.exporters.quiet import without_noise
from qtoolkit.export.exporters.written import OpsWritten
from qtoolkit.export.inputs import ONE_AT_A_TIME, DynamicShapes, ExportSource, Inputs, check_outputs
from qtoolkit.export.pairs.shaped_weights import shaped_weights
from qtoolkit.export.pairs.stored_weights import StoredWeights, stored_weights
from qtoolkit.extras import needed
from qtoolkit.files import checked_path
from qtoolkit.graph.verdict_now import ops_put_in
from qtoolkit.instead import in_order
from qtoolkit.integer.kernels import in_float
from qtoolkit.model_inputs import split, tensors_of
from qtoolkit.model_state import attribute_kept, evaluating
from qtoolkit.progress import progress_bar, step
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.report.lost_kernels import lost_kernels
from qtoolkit.runtimes.table import ONNXRUNTIME

if TYPE_CHECKING:
    import onnx_ir

    from qtoolkit.export.exporters.torch_exporters import ExportRequest
    from qtoolkit.export.files.files import OpenedFile
    from qtoolkit.export.verification.verify import Verification

Exporter = Literal["dynamo", "torchscript"]


@dataclass(frozen=True)
class ExportResult:
    """The result of `export_onnx`.

    Attributes:
        path: The file.
        opset: Its ONNX opset.
        quantize_nodes: Number of QuantizeLinear nodes.
        dequantize_nodes: Number of DequantizeLinear nodes.
        bytes: Size of the file, including external weights.
        verification: Comparison with onnxruntime's quantized values, or None with `verify=False`.
        weights: How the file stores the quantized weights, and which arguments would make the file smaller or faster.
        in_float: Layers that the target computes in float because of the user's configs (`qtoolkit.prepare` warns about these)
            or packed 4-bit weights: a count for each kind and reason.
    """

    path: Path
    opset: int
    quantize_nodes: int
    dequantize_nodes: int
    bytes: int
    verification: "Verification | None"
    weights: tuple[StoredWeights, ...] = ()
    in_float: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = (
            f"{self.path}: {self.bytes / 1024:.1f} KiB, opset {self.opset}, {self.quantize_nodes} QuantizeLinear and "
            f"{self.dequantize_nodes} DequantizeLinear nodes"
        )
        verification = [] if self.verification is None else [self.verification]
        lost = (f"computed in float: {each}" for each in self.in_float)
        return "\n".join(map(str, [head, *self.weights, *lost, *verification]))


@in_order(model="model", inputs="example_inputs", path="path")
def export_onnx(
    model: nn.Module,
    example_inputs: object,
    path: str | os.PathLike[str],
    opset: int | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    dynamic_shapes: DynamicShapes | None = None,
    verify: bool = True,
    exporter: Exporter = "dynamo",
    integer_weights: bool | None = None,
    dynamic_batch: bool = False,
    progress: bool = True,
    *,
    weight_codes: WeightCodes | None = None,
    backend: str | Backend | None = None,
    float_type: FloatType | None = None,
    keep_io_types: bool = True,
) -> ExportResult:
    """Write a calibrated or converted model as an ONNX file with Q/DQ pairs.

    Weights of at most 4 bits are packed as INT4 or UINT4 if the opset is 21 or newer. All other quantized values of fewer than
    8 bits are stored in 8 bits, and the file clips them to their range. onnxruntime's integer kernels support 8 bits only. The
    formats "e4m3" and "e5m2" need opset 19; "e2m1" needs opset 23, and onnxruntime's CPU kernels do not support it.
    Power-of-two scales of groups are stored in 8 bits (E8M0) from opset 24 on.

    Quantizers compute in float32, also in a float16 or bfloat16 model. Their nodes take the model's type if that gives the same
    quantized values: from opset 19 on if the scale is exact in this type (as with `scale_dtype="float16"` and `pow2_scale`),
    and in bfloat16 from opset 23 on, where nodes accept float32 scales (onnxruntime does not accept them for float16). All
    other nodes need Casts before and after them. Disabled quantizers (`qtoolkit.disable_quantization`) have no nodes.

    With float_type="float16", the default for "tensorrt", float ops and biases are float16, and so are the nodes of quantizers
    with float16 scales (`scale_dtype="float16"`). The quantized weights do not change. Ops that lose accuracy in float16
    compute in float32, between Casts: softmaxes, exponentials and logarithms, sums and means, cumulative sums, and instance and
    group norms (`qtoolkit.export.passes.float32_ops`). A LayerNormalization sums in float32 by its definition. The file is
    compared with the model in float16. Use it for targets that compute in the types of a file, such as TensorRT 11.
    onnxruntime's CPU backend computes most of it in float32, without integer kernels.

    The weights of a model above 2 GB, the size limit of an ONNX file, are written to a second file in the same folder: `path`
    with ".data" appended (or ".1.data", if an existing model at the path uses ".data"). If any step fails, nothing is written:
    an existing model and its weights stay intact, even if the process is killed.

    If forward branches on values, "dynamo" raises an error, and "torchscript" exports the branch that the example inputs take;
    `verification.unreached` then names the quantizers of the other branches. Export one file for each branch.

    Args:
        model: The result of `qtoolkit.prepare`, `qtoolkit.quant_modules.replace` or `qtoolkit.convert`, or any other module
            with quantizers. It is not changed.
        example_inputs: A tuple of inputs (tensors, alone or in lists and dicts), a mapping of keyword inputs, or one tensor.
            They give the shapes and are the inputs of the verification.
        path: The file to write.
        opset: ONNX opset, from 13 to the newest of the installed onnx. Verification needs an opset that onnxruntime supports
            (1.32: up to 28; 1.30: up to 26). None means 18; 19 for a file in float16; 21 if more than 8 bits or a group_size
            need it; 22 for a model in bfloat16. The model is converted if torch's exporters do not write the opset
            ("dynamo" writes 18 to 23, "torchscript" 13 to 20).
        input_names: Names of the file's inputs, one for each tensor in the example inputs, in the order of forward's arguments.
            Inputs without a given name keep the argument names.
        output_names: Names of the file's outputs.
        dynamic_shapes: Dynamic dimensions in the format of torch.export: ({0: "batch"},) for one input.
        verify: Run the file in onnxruntime and compare all quantized values with the model (see `verify_onnx`); with dynamic
            dimensions also on inputs of other sizes, if the model accepts them.
        exporter: "dynamo" (torch.export-based) or "torchscript" (deprecated in torch).
        integer_weights: True stores weights as integers with only a DequantizeLinear; False stores them as floats with both
            nodes; None follows the backend.
        dynamic_batch: Make dimension 0 of all inputs dynamic, under the name "batch". Excludes dynamic_shapes.
        progress: Show a progress bar.
        weight_codes: The storage type of signed 8-bit weights: "int8", or "uint8" with a zero point of 128, for which
            onnxruntime's sums are exact on every processor; None follows the backend (`Backend.weight_codes`).
        backend: The target, for a model that does not record one: a model with custom quantizers, or a single layer of a model.
            Models from `prepare`, `replace`, `initialize` and `convert` record their backend.
        float_type: The type of float ops: "float32", or "float16" (opset 19 or newer). None uses the target's type
            (`Backend.float_type`) for a model in float32 or in that type, and the model's own type otherwise.
        keep_io_types: If True, a file with float_type="float16" casts its float32 inputs and outputs; if False, they are
            float16.

    Returns:
        The path, the opset, the number of nodes, the size and the verification.

    Raises:
        RuntimeError: A quantizer is not calibrated, torch's exporter cannot export the model, an op does not exist in the
            opset, or quantized values in onnxruntime differ. Also if onnxruntime is the target and does not run the file in a
            default session; for other targets `verification.refused` gives the reason.
        ValueError: An option is unknown or out of range, there are more names than tensors, ONNX does not support a quantizer's
            format, `backend` differs from the backend that the model records, or a number of the model does not fit into
            float16.
        TypeError: The model has no quantizers, or quantizers of `qtoolkit.compat.pytorch_quantization`; it records no backend,
            and none is given; it computes in float64; it returns values other than tensors; or the example inputs do not match
            its forward.
        ImportError: The extra [onnx] is not installed.

    Example:
        >>> import tempfile
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2)).eval(), backend="onnxruntime")
        >>> report = qt.calibrate(prepared, [torch.rand(8, 4)], progress=False)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = qt.export_onnx(prepared, (torch.rand(8, 4),), folder + "/model.onnx", input_names=["x"])
        >>> result.verification.weight_codes.differing
        0
    """
    check_flags(
        "export_onnx", verify=verify, dynamic_batch=dynamic_batch, progress=progress, keep_io_types=keep_io_types
    )
    if str(float_type) == "bfloat16":
        raise ValueError(
            'export_onnx: float_type must be "float32" or "float16", got "bfloat16": its Q/DQ nodes would need 8-bit scales, '
            'which QuantSpec.scale_dtype does not support. Pass float_type="float16", or export a bfloat16 model: '
            "export_onnx(converted.bfloat16(), inputs, path, verify=False)."
        )
    if float_type is not None:
        check_known("float_type of export_onnx:", float_type, get_args(FloatType))
    if integer_weights is not None:
        check_flags("export_onnx", integer_weights=integer_weights)
    check_known("exporter", exporter, get_args(Exporter))
    if weight_codes is not None:
        check_known("weight_codes of export_onnx:", weight_codes, get_args(WeightCodes))
    if dynamic_batch and dynamic_shapes is not None:
        raise ValueError("export_onnx: dynamic_batch and dynamic_shapes exclude each other; pass only one of them.")
    path = checked_path(path, "export_onnx", "model.onnx")
    require_extra("export_onnx")
    from qtoolkit.export.exporters.torch_exporters import ExportRequest
    from qtoolkit.export.files.files import replacing_model
    from qtoolkit.export.float16 import half_types, in_type, type_for
    from qtoolkit.export.pairs.opsets import choose, native

    source = ExportSource.of(model, example_inputs, "export_onnx")
    target = _target(source.model, backend)
    if float_type is None:
        float_type = type_for(target, source)
    casts_ends = float_type == "float16" and keep_io_types and not half_types(source)
    _check_formats(source)
    _warn_of_layers_put_in(source.model)
    chosen = choose(opset, source, float_type)
    Inputs.of(source, input_names)  # names what is wrong with them, before the model runs
    source = in_type(float_type, source)
    inputs = Inputs.of(source, input_names)
    if integer_weights is None:
        integer_weights = target.integer_weights
    stored_as = target.weight_codes if weight_codes is None else weight_codes
    finish = partial(_finish, backend=target, opset=chosen, integer_weights=integer_weights)
    finish = partial(_in_type, finish, target, float_type, casts_ends)
    request = ExportRequest(source.model, inputs, native(chosen, exporter), output_names, dynamic_shapes)
    with ONE_AT_A_TIME, progress_bar("export", "steps", progress, total=3, after=0) as bar:
        step(bar, "torch's exporter")
        with attribute_kept(source.grids.values(), "weight_codes"):
            for grid in source.grids.values():
                grid.weight_codes = stored_as
            exported = written(request, chosen, exporter, finish, dynamic_batch)
        step(bar, "checking the file")
        with replacing_model(exported, Path(path), chosen, "export_onnx") as files:
            step(bar, "comparing with onnxruntime")
            verification = (
                _compared(files[0], source, request, target, dynamic_batch, progress, casts_ends) if verify else None
            )
            size = sum(file.stat().st_size for file in files)
    if stored_as == "int8" and ONNXRUNTIME.runs(target):
        _warn_of_saturation(path, source.grids)
    ops = [node.op_type for node in exported.graph]
    counts = ops.count("QuantizeLinear"), ops.count("DequantizeLinear")
    weights = stored_weights(exported, source.grids, chosen)
    in_float = (*lost_kernels(source.model), *_packed(weights, target))
    return ExportResult(Path(path), chosen, *counts, size, verification, weights, in_float)


def _packed(weights: Sequence[StoredWeights], backend: Backend) -> Iterator[str]:
    """Yield the number of weights that are packed into bytes, which no integer kernel of onnxruntime supports."""
    packed = sum(each.count for each in weights if each.is_packed)
    if packed and ONNXRUNTIME.runs(backend):
        yield (
            f"{packed} of {sum(each.count for each in weights)} weights: they are packed, two or more values per byte, from "
            f"opset 21 on; by default, and with opset=18, they are stored in 8 bits, and {backend.name} computes in integers"
        )


def _target(model: nn.Module, backend: str | Backend | None) -> Backend:
    """Return the backend that a model records; for a model that records none, the given one."""
    recorded = backend_in(model)
    if recorded is None:
        required = "export_onnx: this model records no backend, so the argument backend is required"
        return backend_of(REQUIRED if backend is None else backend, required)
    if backend is not None and backend_of(backend) != recorded:
        raise ValueError(
            f"export_onnx: the model was prepared for {recorded.name!r}, got backend={backend_of(backend).name!r}; leave "
            "backend out, or prepare the float model for the other backend."
        )
    return recorded


def _compared(
    file: Path,
    source: ExportSource,
    request: "ExportRequest",
    backend: Backend,
    dynamic_batch: bool,
    progress: bool,
    casts_ends: bool,
) -> "Verification":
    """Compare a file with its model on the example inputs and, with dynamic dimensions, on inputs of other sizes.

    Returns the comparison on the example inputs. Raises RuntimeError: the file computes other values, or onnxruntime is its
    target and does not run it.
    """
    from qtoolkit.export.files.files import OpenedFile, refusal_of_default_session
    from qtoolkit.export.float16 import casting_ends, to_float32
    from qtoolkit.export.rounded_once import RoundedOnce
    from qtoolkit.export.verification.verify import compare_layers

    inputs, casts = request.inputs, casting_ends(source.model) if casts_ends else nullcontext()
    given: Callable[[Any], Any] = to_float32 if casts_ends else lambda values: values
    shapes = inputs.with_dynamic_batch()[1] if dynamic_batch else request.dynamic_shapes
    # The comparison is of layers alone, without the runtime's optimizations.
    with casts, in_float(source.model), RoundedOnce():
        opened = OpenedFile.of(file)
        found = compare_layers(source.model, given(source.example_inputs), opened, progress)
        found.check()
        if shapes is not None:
            _compare_other_sizes(source.model, given(inputs.of_other_sizes(shapes)), opened, progress)
    refused = refusal_of_default_session(file, given(inputs.tensors))
    if refused and ONNXRUNTIME.runs(backend):
        raise RuntimeError(
            f"export_onnx: onnxruntime runs the file without graph optimizations, but not in its default session: {refused}. "
            "Please report it with the model; verify=False writes the file anyway."
        )
    return replace(found, refused=refused)


def _compare_other_sizes(model: nn.Module, example_inputs: object, file: "OpenedFile", progress: bool) -> None:
    """Compare a file on inputs of other sizes than in the export, if the model accepts them.

    Raises RuntimeError: the file does not run on them, or computes other values because an exporter has written a constant.
    """
    from qtoolkit.export.verification.verify import compare_layers

    args, kwargs = split(example_inputs)
    try:
        with torch.no_grad(), evaluating(model):
            outputs = tensors_of(model(*args, **kwargs))
    except Exception:  # a model may raise anything for a size that it does not take
        return
    if not all(bool(torch.isfinite(output).all()) for output in outputs):  # such as the deviation of one value
        return
    try:
        compare_layers(model, example_inputs, file, progress).check()
    except (RuntimeError, ValueError) as error:
        sizes = ", ".join(str(tuple(tensor.shape)) for tensor in tensors_of(example_inputs))
        raise RuntimeError(
            f"export_onnx: the file matches the model for the example inputs, but not for inputs of sizes {sizes}: torch's "
            "exporter has written a constant in place of a size. Remove that dimension from dynamic_shapes, or use the other "
            f"exporter. ({error})"
        ) from error


def written(
    request: "ExportRequest",
    opset: int,
    exporter: Exporter,
    finish: Callable[["onnx_ir.Model"], None],
    dynamic_batch: bool = False,
) -> "onnx_ir.Model":
    """Return a converted model as written by one of torch's exporters in this opset; `ONE_AT_A_TIME` must be held.

    `finish` replaces the placeholders of quantizers in a model of this opset.
    """
    import onnx_ir
    import onnxscript.optimizer

    from qtoolkit.export.exporters.torch_exporters import EXPORTERS
    from qtoolkit.export.exporters.translation import DOMAIN
    from qtoolkit.export.pairs.opsets import convert_opset

    model, inputs, constant_sizes = request.model, request.inputs, request.dynamic_shapes is None
    if dynamic_batch:
        inputs, shapes = inputs.with_dynamic_batch()
        request = replace(request, inputs=inputs, dynamic_shapes=shapes)
    with (
        # Torch restores the mode through `OpsWritten`, where a Ctrl-C ends that.
        torch.set_grad_enabled(torch.is_grad_enabled()),
        evaluating(model),
        in_float(model),
        without_noise(),
        shaped_weights(model, request.run, request.what),
        OpsWritten(request.what, constant_sizes) as ops,
    ):
        check_outputs(request.run(), request.output_names, inputs)
        exported = convert_opset(EXPORTERS[exporter](request), opset, exporter, request.what)
        ops.check()
        # Weights and scales computed by constant expressions become constants, so that integers can be stored.
        onnxscript.optimizer.fold_constants(exported, should_fold=lambda node: node.domain != DOMAIN)
        finish(exported)
        seen = Counter[str]()
        for node in exported.graph:
            node.metadata_props.clear()  # stack traces, which can exceed the size of a small model
            if node.op_type == "TopK":  # sorted is one of the orders that sorted=False allows; all runtimes then agree
                node.attributes["sorted"] = onnx_ir.AttrInt64("sorted", 1)
            name = node.name or node.op_type
            seen[name] += 1
            node.name = name if seen[name] == 1 else f"{name}_{seen[name]}"  # names are unique
    return exported


def require_extra(what: str) -> None:
    """Raise ImportError, with the packages to install, if the packages for ONNX are missing."""
    for package in ("onnx", "onnxruntime", "onnxscript"):
        needed(package, what, "onnx")


def _warn_of_layers_put_in(model: nn.Module) -> None:
    names = ops_put_in(model)
    if names:
        warn(
            f"export_onnx: layers added to the model after quantization are float in the file: {', '.join(map(repr, names))}; "
            "make that change in the float model, and quantize it again.",
        )


def _warn_of_saturation(path: str | os.PathLike[str], grids: Mapping[str, Grid]) -> None:
    from qtoolkit.export.verification.runtimes.saturating_sums import processor_saturates

    names = [name for name, grid in grids.items() if grid.quantizing and grid.shifts]
    if names and processor_saturates():
        warn(
            f"export_onnx: {str(path)!r} has int8 weights at {some(names)}. This processor has no VNNI instructions, so "
            "onnxruntime's sums saturate and its results are wrong here. Pass weight_codes='uint8', whose sums are exact on "
            "every processor, or quantize weights to 7 bits.",
        )


def _check_formats(source: ExportSource) -> None:
    for name, grid in source.grids.items():
        if grid.spec.format == "nnie":
            raise ValueError(
                f"export_onnx: {name!r} quantizes to format={grid.spec.format!r}, for which ONNX has no node; use "
                "qtoolkit.export.encodings, which writes the float model and the ranges for the target's own compiler."
            )


def _in_type(
    finish: Callable[["onnx_ir.Model"], None],
    backend: Backend,
    float_type: FloatType | None,
    casts_ends: bool,
    model: "onnx_ir.Model",
) -> None:
    """Finish a file. In a float16 file, keep some ops in float32, and with `casts_ends` the inputs and outputs too."""
    import onnxscript.optimizer

    from qtoolkit.export.passes.float32_ops import keep_float32_ends, keep_float32_ops
    from qtoolkit.export.passes.fused_activations import write_tanh_silu

    finish(model)
    if float_type == "float16":
        keep_float32_ops(model)
        if backend.silu_form == "tanh":
            write_tanh_silu(model)
        onnxscript.optimizer.remove_unused_nodes(model)
    if casts_ends:
        keep_float32_ends(model)


def _finish(model: "onnx_ir.Model", backend: Backend, opset: int, integer_weights: bool) -> None:
    """Write the Q/DQ pairs in the opset, and rewrite ops for runtimes' kernels."""
    import onnxscript.optimizer

    from qtoolkit.export.pairs.lowering import lower
    from qtoolkit.export.passes.fusible import write_fusible_forms
    from qtoolkit.export.passes.onnxruntime import (
        drop_saturated_clips,
        keep_float_products,
        keep_float_softmax,
        keep_float_weights,
        keep_small_floats,
    )
    from qtoolkit.export.passes.repeated_pairs import keep_products_of_codes, quantize_moved_codes, repeat_pairs
    from qtoolkit.export.passes.sub_pixel import write_sub_pixel_convolutions

    lower(model, opset, integer_weights)
    drop_saturated_clips(model)
    write_fusible_forms(model)
    quantize_moved_codes(model, opset)
    keep_products_of_codes(model, opset)
    keep_float_products(model)
    if backend.sub_pixel:
        write_sub_pixel_convolutions(model)
    if backend.integer_bias:
        keep_float_weights(model)
    if ONNXRUNTIME.runs(backend):
        keep_float_softmax(model)
        keep_small_floats(model)
    onnxscript.optimizer.remove_unused_nodes(model)
    repeat_pairs(model, backend.repeated_pairs)
