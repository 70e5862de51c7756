"""Inputs and outputs of a file: the tensors of the example inputs, their names, and checks."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn

from qtoolkit.convert import check_quantized, in_reference_form
from qtoolkit.errors import check_sequence, shown
from qtoolkit.export.pairs.shaped_weights import check_shapes
from qtoolkit.finite import check_finite
from qtoolkit.graph.block_calls import map_leaves
from qtoolkit.model_inputs import Keys, bind, call_arguments, leaves, tensors_of, with_tensors
from qtoolkit.model_state import check_module, deepcopy_model
from qtoolkit.quantizers.frozen import Grid
from qtoolkit.quantizers.tensor_quantizer import quantizers_of

# torch's exporters keep their state in global variables, and the verification adds hooks to the model.
ONE_AT_A_TIME = threading.Lock()

T = TypeVar("T")
DynamicShapes = dict[str, Any] | tuple[Any, ...] | list[Any]  # as torch.export takes them
Dimensions = Mapping[int, object] | Sequence[object] | None  # of one tensor: those that are not None vary


def on_cpu(model: nn.Module, inputs: T, what: str) -> tuple[nn.Module, T]:
    """Return a model and its inputs on the CPU, where files are written and verified; the originals if they are there already.

    A GPU sums in another order, and by default rounds the inputs of convolutions to TF32, which changes quantized values.
    """
    model = check_module(model, what)
    if _are_elsewhere([*model.parameters(), *model.buffers()]):
        model = deepcopy_model(model, what=what).cpu()
    tensors = tensors_of(inputs)
    return model, with_tensors(inputs, (t.cpu() for t in tensors)) if _are_elsewhere(tensors) else inputs


def grids_of(model: nn.Module) -> dict[str, Grid]:
    """Return the quantizers of a converted model by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Grid)}


def _dense(tensor: Tensor) -> Tensor:
    """Return a contiguous tensor, as runtimes require: torch.export records the strides of a view such as x[::2]."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    is_dense = tensor.is_contiguous() or (
        tensor.dim() in formats and tensor.is_contiguous(memory_format=formats[tensor.dim()])
    )
    return tensor if is_dense else tensor.contiguous()


def _are_elsewhere(tensors: Sequence[Tensor]) -> bool:
    return any(tensor.device.type not in ("cpu", "meta") for tensor in tensors)


@dataclass(frozen=True)
class Inputs:
    """The inputs of a model, and of its file."""

    args: tuple[object, ...]  # the positional arguments of forward
    kwargs: dict[str, object]  # the keyword arguments
    arguments: dict[str, object]  # all of them by the name of forward's argument
    given: object  # they as the caller gave them
    given_names: tuple[str, ...]  # the names that the caller chose for the first inputs of the file
    what: str  # the public function that takes them, with which errors begin

    @classmethod
    def of(cls, source: "ExportSource", input_names: Sequence[str] | None) -> "Inputs":
        """Return the inputs of a model, with the given names for the first ones.

        Raises TypeError: the example inputs do not match forward, or a tensor is float64; ValueError: too many names, or
        duplicates.
        """
        model, what, given = source.model, source.what, source.example_inputs
        args, kwargs = call_arguments(model, given, f"{what}: example_inputs do")
        arguments = bind(model, given)
        check_sequence(input_names or (), what, "input_names")
        inputs = cls(args, kwargs, arguments, given, tuple(input_names or ()), what)
        check_names(what, "input_names", inputs.given_names, inputs.default_names)
        check_names(what, "input_names", inputs.names, inputs.default_names)
        inputs._check_dtypes(source)
        return inputs

    def _check_dtypes(self, source: "ExportSource") -> None:
        """Raise TypeError for a model or an input of float64."""
        scales = [(f"{name}.scale", grid.scale) for name, grid in source.grids.items()]
        tensors = [*source.model.named_parameters(), *scales, *zip(self.names, self.tensors, strict=True)]
        name = next((name for name, tensor in tensors if tensor.dtype == torch.float64), None)
        if name is not None:
            raise TypeError(
                f"{self.what}: {name!r} is float64, but ONNX quantizes float32 and runtimes have few kernels for float64; "
                "export model.float() with float32 inputs."
            )

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors in the arguments; each is an input of the file."""
        return tensors_of((self.args, self.kwargs))

    @property
    def default_names(self) -> list[str]:
        """A name for each tensor: the argument name, with keys and positions in containers, as torch.export adds them."""
        return ["_".join(map(str, path)) for path, value in leaves(self.arguments) if isinstance(value, Tensor)]

    @property
    def names(self) -> list[str]:
        """The name of each tensor: the given names, then the defaults."""
        return [*self.given_names, *self.default_names[len(self.given_names) :]]

    def sizes(self, dynamic_shapes: DynamicShapes) -> list[Dimensions]:
        """Return the entry of `dynamic_shapes` for each tensor.

        Raises TypeError: a value has a wrong type; ValueError: an argument has no entry, or a tensor lacks a dimension.
        """
        if not isinstance(dynamic_shapes, Mapping | Sequence) or isinstance(dynamic_shapes, str):
            raise TypeError(
                f"{self.what}: dynamic_shapes must be a sequence or a dict of entries for the inputs of forward, such as "
                f"({{0: 'batch'}},), or None, got {shown(dynamic_shapes)}."
            )
        shapes = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else tuple(dynamic_shapes)
        values: Any = self.arguments if isinstance(shapes, Mapping) else (*self.args, *self.kwargs.values())
        unlike = isinstance(shapes, Mapping) and shapes.keys() != values.keys()
        if len(shapes) != len(values) or unlike:
            raise ValueError(
                f"{self.what}: dynamic_shapes must have an entry for each input of forward ({', '.join(self.arguments)}), "
                f"got {list(shapes) if len(shapes) == len(values) else len(shapes)}; an entry is a dict of dimensions, or None."
            )
        found = [(_entry(shapes, path), value) for path, value in leaves(values) if isinstance(value, Tensor)]
        for name, (entry, tensor) in zip(self.names, found, strict=True):
            self._check_entry(name, entry, tensor.dim())
        return [entry for entry, _ in found]

    def _check_entry(self, name: str, entry: object, dims: int) -> None:
        """Check an entry of `dynamic_shapes`: torch.export ignores negative dimensions, the TorchScript exporter crashes."""
        what = f"{self.what}: dynamic_shapes"
        if not isinstance(entry, Mapping | Sequence | None) or isinstance(entry, str):
            raise TypeError(
                f"{what}: the entry of {name!r} must be a dict of dimensions, such as {{0: 'batch'}}, or None, got "
                f"{shown(entry)}."
            )
        axes = entry if isinstance(entry, Mapping) else range(len(entry or ()))
        wrong = [axis for axis in axes if type(axis) is not int or not 0 <= axis < dims]
        if wrong:
            raise ValueError(f"{what}: dimensions of {name!r} must be numbers from 0 to {dims - 1}, got {wrong[0]!r}.")

    def of_other_sizes(self, dynamic_shapes: DynamicShapes) -> object:
        """Return example inputs of other sizes: one more sample, and half the size in other dynamic dimensions, for speed."""
        pairs = zip(self.tensors, self.sizes(dynamic_shapes), strict=True)
        tensors = iter([_of_other_size(tensor, entry) for tensor, entry in pairs])
        return with_tensors(self.arguments if self.kwargs else self.args, tensors)

    def with_dynamic_batch(self) -> "tuple[Inputs, dict[str, object]]":
        """Return inputs with at least two samples, and the `dynamic_shapes` with a dynamic dimension 0 for each tensor.

        torch.export treats a dimension of size 1 as static. Tensors without dimensions are unchanged. Raises ValueError:
        dimension 0 differs between tensors, or no tensor has one.
        """
        sizes = {name: len(tensor) for name, tensor in zip(self.names, self.tensors, strict=True) if tensor.dim() > 0}
        if len(set(sizes.values())) != 1:
            found = ", ".join(f"{name}: {size}" for name, size in sizes.items()) or "no tensor with dimensions"
            raise ValueError(
                f"{self.what}: dynamic_batch=True needs example inputs with the same batch size in dimension 0, got {found}; "
                "name the dynamic dimensions with dynamic_shapes."
            )
        shapes = map_leaves(self.arguments, lambda x: {0: "batch"} if isinstance(x, Tensor) and x.dim() else None)
        if set(sizes.values()) != {1}:
            return self, shapes
        doubled = [torch.cat([tensor, tensor]) if tensor.dim() > 0 else tensor for tensor in self.tensors]
        args, kwargs = with_tensors((self.args, self.kwargs), iter(doubled))
        return replace(self, args=args, kwargs=kwargs), shapes


@dataclass(frozen=True)
class ExportSource:
    """The model, inputs and quantizers that a file is written from, on the CPU."""

    model: nn.Module  # the converted model
    grids: Mapping[str, Grid]  # its quantizers by their names
    example_inputs: object  # inputs, as `export_onnx` takes them
    what: str  # the public function, with which errors begin

    @classmethod
    def of(cls, model: nn.Module, example_inputs: T, what: str) -> "ExportSource":
        """Return the source of a prepared model (which is converted) or of a converted model.

        Raises TypeError: it has no quantizers, or quantizers of `qtoolkit.compat.pytorch_quantization`; RuntimeError: one is
        not calibrated; ValueError: nothing is quantized, or a quantizer cannot be written to a file.
        """
        model = check_quantized(model, what)
        converted, inputs = on_cpu(in_reference_form(model) if quantizers_of(model) else model, example_inputs, what)
        grids = grids_of(converted)
        if not grids:
            raise ValueError(
                f"{what}: nothing in the model is quantized; qtoolkit.quantization_report(prepared) gives the reasons. "
                f"To export the float model, use torch.onnx.export."
            )
        check_shapes(converted, what)
        check_finite(converted, what)
        dense = with_tensors(inputs, (_dense(tensor) for tensor in tensors_of(inputs)))
        return cls(converted, grids, dense, what)


class _ByName(nn.Module):
    """Calls a graph, with its submodules, parameters and buffers under the same names."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__()
        vars(self).update(vars(graph))
        self.forward = graph.forward


def by_name(model: nn.Module, kwargs: Mapping[str, object]) -> nn.Module:
    """Return a model for `torch.export` that takes the keyword arguments `kwargs` by name; the model itself without `kwargs`.

    torch.export passes keyword arguments to a GraphModule by position, so an omitted argument would shift the others.

    Example:
        >>> graph = fx.symbolic_trace(nn.Bilinear(2, 2, 2))
        >>> list(by_name(graph, {"input2": torch.ones(2)}).state_dict())
        ['weight', 'bias']
    """
    return _ByName(model) if kwargs and isinstance(model, fx.GraphModule) else model


def check_names(what: str, argument: str, names: Sequence[str], known: Sequence[str]) -> None:
    """Raise ValueError for more names than the file has inputs or outputs, and for empty or duplicate names."""
    check_sequence(names, what, argument)
    if not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{what}: {argument} must be names of at least one letter, got {list(names)}.")
    if len(names) > len(known):
        raise ValueError(
            f"{what}: {argument} must have at most one name for each {argument.removesuffix('_names')} of the file, got "
            f"{len(names)} for {len(known)} ({', '.join(known)})."
        )
    if len(set(names)) < len(names):
        raise ValueError(f"{what}: {argument} must be different names, got {list(names)}.")


def check_outputs(outputs: object, output_names: Sequence[str] | None, inputs: Inputs) -> None:
    """Check the outputs of a model, and their names; errors begin with `inputs.what`, the public function.

    Raises TypeError: an output is a number or a string; ValueError: too many names, duplicates, or the name of an input.
    """
    what = inputs.what
    found = {"".join(["output", *(f"[{key!r}]" for key in path)]): value for path, value in leaves(outputs)}
    for place, value in found.items():
        if not isinstance(value, Tensor | None):
            raise TypeError(
                f"{what}: the outputs of an ONNX file are tensors, but forward returns {shown(value)} in {place}; export a "
                "wrapper module that returns only the tensors."
            )
    tensors = [place for place, value in found.items() if value is not None]
    check_names(what, "output_names", output_names or (), tensors)
    both = [name for name in output_names or () if name in inputs.names]
    if both:
        raise ValueError(
            f"{what}: output_names must differ from the names of the inputs ({', '.join(inputs.names)}), got {both[0]!r}."
        )


def _of_other_size(tensor: Tensor, entry: Dimensions) -> Tensor:
    dims = entry.items() if isinstance(entry, Mapping) else enumerate(entry or ())
    for axis, dim in dims:
        if dim is not None and not isinstance(dim, int):
            size = tensor.size(axis)
            more = tensor.narrow(axis, 0, min(size, 1))
            tensor = torch.cat([tensor, more]) if axis == 0 else tensor.narrow(axis, 0, max(size // 2, 1))
    return tensor.contiguous()


def _entry(entries: Any, path: Keys) -> Any:
    """Return the entry for a tensor by its path of keys and positions; None if a part of the path is None."""
    return reduce(lambda entry, key: None if entry is None else entry[key], path, entries)
