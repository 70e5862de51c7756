"""A converted model in float16, which a file in float16 is written from and compared with."""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from qtoolkit.backends import Backend
from qtoolkit.config.formats import FloatType
from qtoolkit.errors import first_line, some
from qtoolkit.export.inputs import ExportSource, grids_of
from qtoolkit.model_inputs import split, tensors_of
from qtoolkit.model_state import deepcopy_model, evaluating, removing

LARGEST = 65504.0
REMEDY = 'write the file with float_type="float32"'


def type_for(backend: Backend, source: ExportSource) -> FloatType | None:
    """Return the type of a file for which none is asked for: the target's, or None for that of a model in half precision."""
    return None if _half_types(source) else backend.float_type


def in_type(float_type: str | None, source: ExportSource) -> ExportSource:
    """Return a source whose model, with its inputs, is of a float type: "float32" or "float16", or None for its own.

    Quantizers compute in float32 in each.

    Raises ValueError: float16 does not have a parameter or a value that the example inputs give, or the model is not in
    float32; RuntimeError: the model does not run in float16.
    """
    if float_type is None:
        return source
    if float_type == "float32":
        _refuse_other_types(source)
        return source
    _check_parameters(source)
    model = deepcopy_model(source.model, what=source.what).half()
    result = replace(source, model=model, grids=grids_of(model), example_inputs=_to_float16(source.example_inputs))
    _check_values(result)
    _warn_of_other_scales(result)
    return result


@contextmanager
def casting_ends(model: nn.Module) -> Iterator[None]:
    """Let a model in float16 take and return float32, as its file does."""
    with removing(
        [
            model.register_forward_pre_hook(
                lambda model, args, kwargs: (_to_float16(args), _to_float16(kwargs)), with_kwargs=True
            ),
            model.register_forward_hook(lambda model, args, y: to_float32(y)),
        ]
    ):
        yield


def to_float32(values: Any) -> Any:
    """Return nested values with tensors of float16 in float32."""
    return tree_map(lambda x: x.float() if isinstance(x, Tensor) and x.dtype == torch.float16 else x, values)


def _half_types(source: ExportSource) -> set[str]:
    return {str(p.dtype) for p in source.model.parameters() if p.dtype in (torch.float16, torch.bfloat16)}


def _refuse_other_types(source: ExportSource) -> None:
    others = _half_types(source)
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
        if not is_scale and tensor.is_floating_point() and bool((tensor.abs() > LARGEST).any()):
            raise ValueError(
                f'{source.what}: float_type="float16" has no number above 65,504, and {name!r} has '
                f"{float(tensor.abs().max()):g}; {REMEDY}."
            )


def _check_values(source: ExportSource) -> None:
    """Run the model on the example inputs; name the first module whose results are not finite."""
    found: list[str] = []

    def note(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: object, y: object) -> None:
            tensors = [t for t in tensors_of(y) if t.is_floating_point()]
            if not found and not all(bool(t.isfinite().all()) for t in tensors):
                found.append(name)

        return hook

    args, kwargs = split(source.example_inputs)
    hooks = [module.register_forward_hook(note(name)) for name, module in source.model.named_modules()]
    try:
        with removing(hooks), torch.no_grad(), evaluating(source.model):
            source.model(*args, **kwargs)
    except RuntimeError as error:
        raise RuntimeError(
            f'{source.what}: the model does not run with float_type="float16" ({first_line(error)}): it may make tensors of '
            f'float32 by itself. Make them of the type of its inputs, or pass float_type="float32".'
        ) from error
    if found:
        raise ValueError(
            f'{source.what}: with float_type="float16", {found[0] or "the model"!r} returns NaN or infinities for the example '
            f"inputs: a value is above 65,504, the largest number of float16. Scale the values before it down, or {REMEDY}."
        )


def _warn_of_other_scales(source: ExportSource) -> None:
    grids = {name: grid for name, grid in source.grids.items() if grid.quantizing}
    others = [
        repr(name) for name, grid in grids.items() if not torch.equal(grid.scale.half().to(grid.scale), grid.scale)
    ]
    if others:
        warnings.warn(
            f"{source.what}: the scales of {len(others)} of {len(grids)} quantizers are no float16 numbers: {some(others)}. "
            f"Their nodes stand between Casts to float32, which cost what float16 saves; prepare the model with "
            f'QuantSpec(scale_dtype="float16") in its QConfigMapping.',
            stacklevel=4,  # the caller of export_onnx, whose decorator has a frame too
        )
