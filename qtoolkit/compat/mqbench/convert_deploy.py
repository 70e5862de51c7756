"""convert_deploy(): write the same files as MQBench for a backend."""

import inspect
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qtoolkit.compat.mqbench.platforms import BackendType, backend_of, platform_of
from qtoolkit.compat.mqbench.scheme import Options
from qtoolkit.convert import check_quantized
from qtoolkit.eager.record import backend_in
from qtoolkit.errors import check_known
from qtoolkit.export.backend_files import encodings
from qtoolkit.export.onnx import export_onnx
from qtoolkit.graph.passes import freeze

_OPTIONS = ("input_names", "output_names", "dynamic_axes", "opset_version")


def convert_deploy(
    model: nn.Module,
    backend_type: BackendType | str,
    input_shape_dict: Mapping[str, Sequence[int]] | None = None,
    dummy_input: object = None,
    output_path: str | os.PathLike[str] = "./",
    model_name: str = "mqbench_qmodel",
    deploy_to_qlinear: bool = False,
    **extra_kwargs: object,
) -> tuple[Path, ...]:
    """Write a calibrated or trained model for a backend. The model is not changed.

    It writes `<model_name>.onnx` with Q/DQ nodes, verified in onnxruntime, for all backends except NNIE. For backends with
    their own compiler it also writes the compiler's files (`qtoolkit.export.encodings`), under MQBench's names. It returns the
    paths.

    The arguments are MQBench's. `dummy_input` may also be a mapping of keyword inputs; `deploy_to_qlinear` must be False;
    `extra_kwargs` may be `input_names`, `output_names`, `dynamic_axes` (axis 0 of all inputs) and `opset_version`.

    Raises:
        ValueError: An option is unknown or has no equivalent, the model was prepared for another backend, or a file cannot hold
            a grid of the model.
        TypeError: The model is not quantized.

    Example:
        >>> import tempfile
        >>> from qtoolkit.compat import mqbench
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU())
        >>> model = mqbench.prepare_by_platform.prepare_by_platform(model, BackendType.SNPE)
        >>> mqbench.utils.state.enable_calibration(model)
        >>> _ = model(torch.rand(2, 3, 8, 8))
        >>> mqbench.utils.state.enable_quantization(model)
        >>> shapes = {"x": [1, 3, 8, 8]}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     files = convert_deploy(model.eval(), BackendType.SNPE, shapes, output_path=folder, model_name="net")
        >>> [file.name for file in files]
        ['net.onnx', 'net_deploy_model.onnx', 'net_clip_ranges.json']
    """
    platform, options = platform_of(backend_type), _options(extra_kwargs)
    if deploy_to_qlinear:
        raise ValueError(
            "convert_deploy: deploy_to_qlinear must be False; onnxruntime makes integer ops of the Q/DQ nodes itself."
        )
    model = check_quantized(model, "convert_deploy")
    recorded = backend_in(model)
    if recorded is not None and recorded.name != platform.backend:
        raise ValueError(
            f"convert_deploy: the model was prepared for {recorded.name!r}, got a backend_type for {platform.backend!r}; pass "
            "the BackendType that the model was prepared for."
        )
    inputs, names = _inputs(model, input_shape_dict, dummy_input)
    options.setdefault("input_names", names)
    stem, files = Path(output_path) / model_name, []
    if platform.qdq:
        path, backend = stem.with_name(f"{model_name}.onnx"), recorded or backend_of(platform, academic_mode=False)
        files.append(export_onnx(model, inputs, path, backend=backend, **options).path)
    if platform.own_files:
        written = encodings(model, platform.backend, inputs, stem, **options)
        files += [written.model, *written.files]
    return tuple(files)


def convert_merge_bn(model: nn.Module) -> None:
    """Fold the batch norms of a prepared model, and freeze its scales, in place."""
    freeze.run(check_quantized(model, "convert_merge_bn"))


def _options(given: Options) -> dict[str, Any]:
    """Return the options of torch.onnx.export that qtoolkit's exports support."""
    for name in given:
        check_known("option of convert_deploy", name, _OPTIONS)
    options = {name: given[name] for name in ("input_names", "output_names") if given.get(name) is not None}
    if given.get("opset_version") is not None:
        options["opset"] = given["opset_version"]
    axes = given.get("dynamic_axes") or {}
    if any(list(dims) != [0] for dims in axes.values()):
        raise ValueError(
            f"convert_deploy: dynamic_axes may contain only axis 0, got {axes!r}; for other axes, pass dynamic_shapes to "
            "qtoolkit.export_onnx."
        )
    return {**options, "dynamic_batch": True} if axes else options


def _inputs(
    model: nn.Module, shapes: Mapping[str, Sequence[int]] | None, dummy: object
) -> tuple[object, list[str] | None]:
    """Return example inputs, and their names in the file."""
    if (shapes is None) == (dummy is None):
        raise ValueError("convert_deploy: pass either input_shape_dict or dummy_input.")
    if shapes is not None:
        return tuple(torch.rand(*shape) for shape in shapes.values()), list(shapes)
    by_keyword = isinstance(dummy, Mapping) and set(dummy) <= set(inspect.signature(model.forward).parameters)
    return dummy if by_keyword or not isinstance(dummy, Mapping) else (dummy,), None


__all__ = ["convert_deploy", "convert_merge_bn"]
