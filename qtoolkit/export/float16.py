"""Convert a converted model to float16, for export to float16 files and for their verification."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from qtoolkit.backends import Backend
from qtoolkit.config.formats import FloatType
from qtoolkit.errors import first_line, some, warn
from qtoolkit.export.inputs import ExportSource, grids_of
from qtoolkit.export.pairs.shaped_weights import ConstantWeight, weights_given
from qtoolkit.export.rounded_once import HALVES, RoundedOnce
from qtoolkit.graph.blocks import TracedBlock
from qtoolkit.graph.graph_module import QuantizedGraphModule
from qtoolkit.graph.passes import widen_norms
from qtoolkit.integer.kernels import in_float
from qtoolkit.model_inputs import naming_misfits, split, tensors_of
from qtoolkit.model_state import deepcopy_model, evaluating, removing
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.spec_ops import range_of

LARGEST, SMALLEST = 65504.0, 2.0**-24
OF_MASKS = "such as -1e4 for the -1e9 of a mask"
REMEDY = 'write the file with float_type="float32"'


def type_for(backend: Backend, source: ExportSource) -> FloatType | None:
    """Return the default float type of a file: the target's type, or None for a model in another type, which keeps its own."""
    return backend.float_type if half_types(source) <= {f"torch.{backend.float_type}"} else None


def in_type(float_type: str | None, source: ExportSource) -> ExportSource:
    """Return a source with model and inputs in a float type: "float32", "float16", or None for their own type.

    In every type, quantizers compute in float32, and the quantized weights are the same as in float32.

    Raises ValueError: a parameter, the range of a quantizer, or a value for the example inputs does not fit into float16, or
    the model is not in float32; RuntimeError: the model does not run in float16.
    """
    if float_type is None:
        return source
    if float_type == "float32":
        _refuse_other_types(source)
        return source
    result, lost = _in_float16(source)
    for sentence in (*lost, *_other_scales(result)):
        warn(sentence)
    return result


@contextmanager
def computing_in_float16(model: nn.Module, inputs: object, what: str) -> Iterator[nn.Module]:
    """Yield a copy of a model that computes in float16 without integer kernels, like a file in float16.

    It takes and returns float32. A 16-bit model already has the type of its file, and is yielded itself.
    """
    source = ExportSource(model, grids_of(model), inputs, what)
    if half_types(source):
        with RoundedOnce():
            yield model
        return
    with in_float(model):
        source, _ = _in_float16(source)  # the export has said what is lost
    with casting_ends(source.model), RoundedOnce():
        yield source.model


@contextmanager
def casting_ends(model: nn.Module) -> Iterator[None]:
    """Let a float16 model take and return float32, like its file."""
    with removing(
        [
            model.register_forward_pre_hook(
                lambda model, args, kwargs: (_to_float16(args), _to_float16(kwargs)), with_kwargs=True
            ),
            model.register_forward_hook(lambda model, args, y: to_float32(y)),
        ]
    ):
        yield


def _in_float16(source: ExportSource) -> tuple[ExportSource, list[str]]:
    """Return a source with a float16 model, and warnings about lost accuracy."""
    _check_parameters(source)
    lost = _check_ranges(source)
    model = deepcopy_model(source.model, what=source.what).half()
    for part in (part for part in model.modules() if isinstance(part, QuantizedGraphModule)):
        widen_norms.run(part)
    result = replace(source, model=model, grids=grids_of(model), example_inputs=_to_float16(source.example_inputs))
    before: dict[str, float] = {}
    is_weight, run = (lambda grid: grid.of_weight and grid.quantizing), (lambda: before.update(_largest_values(source)))
    with naming_misfits(source.model, source.example_inputs, f"{source.what}: example_inputs do"):
        weights = weights_given(source.model, is_weight, run, source.what)
    lost += _keep_codes(source, result, weights)
    lost += _check_values(source.what, before, _run_in_float16(result))
    return result, lost


def to_float32(values: Any) -> Any:
    """Return nested values with float16 tensors cast to float32."""
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == torch.float16 else x, values)


def half_types(source: ExportSource) -> set[str]:
    """Return the 16-bit types of a model's parameters."""
    return {str(p.dtype) for p in source.model.parameters() if p.dtype in HALVES}


def _refuse_other_types(source: ExportSource) -> None:
    others = half_types(source)
    if others:
        raise ValueError(
            f'{source.what}: float_type="float32" is for a model in float32, got {", ".join(sorted(others))}; pass '
            f"model.float() with inputs of float32, or leave float_type out for the model's own type."
        )


def _to_float16(values: Any) -> Any:
    return tree_map(lambda x: x.half() if isinstance(x, Tensor) and x.dtype == torch.float32 else x, values)


def _check_parameters(source: ExportSource) -> None:
    for name, tensor in (*source.model.named_parameters(), *source.model.named_buffers()):
        is_scale = any(name.startswith(f"{grid}.") for grid in source.grids)
        if is_scale or not tensor.is_floating_point():
            continue
        # An infinity of a mask is one in float16 too.
        largest = float(tensor.detach().abs().nan_to_num_(0.0, 0.0).max()) if tensor.numel() else 0.0
        if largest > LARGEST:
            raise ValueError(
                f'{source.what}: float_type="float16" has no number above 65,504, but {name!r} contains '
                f"{largest:g}. Use smaller values, {OF_MASKS}, or {REMEDY}."
            )


def _check_ranges(source: ExportSource) -> list[str]:
    """Raise for activation ranges that exceed float16, and return warnings for steps below its smallest number."""
    small = []
    for name, grid in source.grids.items():
        if grid.of_weight or not grid.quantizing:
            continue
        low, high = (float(end.abs().max()) for end in range_of(grid.spec, grid.scale, grid.zero_point))
        largest = high if grid.spec.symmetric else max(low, high)
        if largest > LARGEST:
            raise ValueError(
                f'{source.what}: float_type="float16" has no number above 65,504, but the range of {name!r} ends at '
                f"{largest:g}. Scale the quantized tensor down, or {REMEDY}."
            )
        small += [f"{name!r} ({float(grid.scale.max()):.2g})"] if bool((grid.scale < SMALLEST).all()) else []
    if not small:
        return []
    return [
        f"{source.what}: the steps of {some(small)} are below 6e-8, the smallest number of float16: most of the quantized "
        f"values become zero. Scale these tensors up, or {REMEDY}."
    ]


def _keep_codes(source: ExportSource, result: ExportSource, weights: Mapping[Grid, Tensor]) -> list[str]:
    """Replace weights in float16 by their quantized values, which rounding to float16 leaves on the grid.

    An unquantized weight, once rounded to float16, may be quantized to the next step. Warns about grids with too many bits for
    float16.
    """
    moved = []
    for name, grid in source.grids.items():
        if grid not in weights:
            continue
        codes, own = grid.codes(weights[grid]), result.grids[name]
        values = grid.values(codes).half()
        own.shape = ConstantWeight(values)
        differing = int((own.codes(values) != codes).sum())
        moved += [f"{name!r} ({differing} of {codes.numel()})"] if differing else []
    if not moved:
        return []
    return [
        f"{source.what}: the weights of {len(moved)} quantizers have more bits than the 11 of float16: the file has other "
        f"values for {some(moved)}. Quantize them to 8 bits, or {REMEDY}."
    ]


def _largest_values(source: ExportSource) -> dict[str, float]:
    """Run a model on its example inputs; return the largest output magnitude of each module, in order; infinity for NaN."""
    found: dict[str, float] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, y: object) -> None:
            tensors = [t for t in tensors_of(y) if t.is_floating_point() and t.numel()]
            values = (float(t.abs().nan_to_num(torch.inf, torch.inf).max()) for t in tensors)
            found[name] = max((found.get(name, 0.0), *values))

        return hook

    args, kwargs = split(source.example_inputs)
    parts = {name: part for name, part in source.model.named_modules() if not isinstance(part, TracedBlock)}
    hooks = [part.register_forward_hook(note(name)) for name, part in parts.items()]
    with removing(hooks), torch.no_grad(), evaluating(source.model), in_float(source.model), RoundedOnce():
        source.model(*args, **kwargs)
    return found


def _run_in_float16(source: ExportSource) -> dict[str, float]:
    try:
        return _largest_values(source)
    except RuntimeError as error:
        if "without overflow" in str(error):  # torch's, of a Python number beside a tensor
            raise ValueError(
                f'{source.what}: float_type="float16" has no number above 65,504, but the forward of the model uses a larger '
                f"constant. Use a smaller one, {OF_MASKS}, or {REMEDY}."
            ) from error
        raise RuntimeError(
            f'{source.what}: the model does not run with float_type="float16" ({first_line(error)}): it may create float32 '
            'tensors. Create them in the dtype of its inputs, or pass float_type="float32".'
        ) from error


def _check_values(what: str, before: Mapping[str, float], after: Mapping[str, float]) -> list[str]:
    """Raise for values that exceed float16; return warnings for modules with outputs that become zero."""
    infinite = [
        name for name, value in after.items() if not math.isfinite(value) and math.isfinite(before.get(name, 0.0))
    ]
    if infinite:
        raise ValueError(
            f'{what}: with float_type="float16", {infinite[0] or "the model"!r} returns NaN or infinity for the example '
            "inputs: a value exceeds 65,504, the largest number of float16, or a divisor is below 6e-8, which is zero in "
            f"float16. Scale its inputs down, use an eps of 1e-7 or more, or {REMEDY}."
        )
    zero = [
        f"{name!r} ({before[name]:.2g})" for name, value in after.items() if value == 0 < before.get(name, 0) < SMALLEST
    ]
    if not zero:
        return []
    return [
        f'{what}: with float_type="float16", the outputs of {some(zero)} are zero for the example inputs: float16 has no '
        f"number between 0 and 6e-8. Scale their inputs up, or {REMEDY}."
    ]


def _other_scales(source: ExportSource) -> list[str]:
    grids = {name: grid for name, grid in source.grids.items() if grid.quantizing}
    others = [
        repr(name) for name, grid in grids.items() if not torch.equal(grid.scale.half().to(grid.scale), grid.scale)
    ]
    if not others:
        return []
    return [
        f"{source.what}: the scales of {len(others)} of {len(grids)} quantizers are not exact in float16: {some(others)}. "
        "Their nodes need Casts to float32, which undo the speedup of float16; prepare the model with "
        f'QuantSpec(scale_dtype="float16") in its QConfigMapping.'
    ]
