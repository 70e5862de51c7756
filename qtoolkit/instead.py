"""Names that other tools have, and arguments in another order, with the names and the order to write instead."""

import functools
import inspect
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Mapping
from types import ModuleType
from typing import ParamSpec, TypeVar

from torch import nn

from qtoolkit.errors import unknown

P = ParamSpec("P")
R = TypeVar("R")

# What other tools' names of formats mean here.
FORMATS = {
    **dict.fromkeys(("fp8", "float8", "float8_e4m3", "float8_e4m3fn", "e4m3fn"), "e4m3"),
    **dict.fromkeys(("float8_e5m2", "bf8"), "e5m2"),
    **dict.fromkeys(("fp4", "float4", "float4_e2m1fn_x2"), "e2m1"),
}
# What other tools' names of methods mean, for the method of a range and for an observer.
RANGES = {
    **dict.fromkeys(("kl", "kld", "kl_divergence", "kullback_leibler"), "entropy"),
    **dict.fromkeys(("max", "absmax", "abs_max", "amax", "min_max"), "minmax"),
    **dict.fromkeys(("sqnr", "mean_squared_error"), "mse"),
}
OF_OBSERVERS = {name: method if method == "minmax" else "histogram" for name, method in RANGES.items()}
OF_OBSERVERS |= dict.fromkeys(("percentile", "mse", "l2", "entropy"), "histogram")
PREPARE = (
    "qtoolkit.prepare(model, example_inputs, backend=...), which prepares for QAT in training mode and for PTQ in eval "
    "mode"
)
DEFAULT = "qtoolkit.prepare(model, example_inputs, backend=...): the backend gives the default config"
STUBS = "qtoolkit.prepare(model, example_inputs, backend=...), which places the quantizers; it needs no stubs"
# For names that the package does not have.
WAYS = {
    **dict.fromkeys(("prepare_qat", "prepare_ptq", "prepare_fx", "prepare_qat_fx"), PREPARE),
    **dict.fromkeys(("prepare_pt2e", "prepare_qat_pt2e", "quantize_", "quantize_fx"), PREPARE),
    **dict.fromkeys(("convert_fx", "convert_pt2e"), "qtoolkit.convert(prepared)"),
    **dict.fromkeys(("get_default_qconfig", "get_default_qat_qconfig"), DEFAULT),
    **dict.fromkeys(("get_default_qconfig_mapping", "get_default_qat_qconfig_mapping"), DEFAULT),
    **dict.fromkeys(("QuantStub", "DeQuantStub"), STUBS),
    "quantize_dynamic": "qtoolkit.QuantSpec(dynamic=True) for the activations of a qtoolkit.QConfig",
    "FakeQuantize": "qtoolkit.TensorQuantizer",
    "QuantDescriptor": "qtoolkit.QuantSpec",
    "replace": "qtoolkit.quant_modules.replace",
    "initialize": "qtoolkit.quant_modules.initialize",
    "save": "qtoolkit.save_checkpoint",
    "load": "qtoolkit.load_checkpoint",
}
# The arguments of QuantSpec that other tools call by another name, and those that say the same in another way.
RENAMED = {
    **dict.fromkeys(("num_bits", "n_bits", "nbits", "bit", "bit_width", "bitwidth"), "bits"),
    **dict.fromkeys(("ch_axis", "channel_axis", "quant_axis"), "axis"),
    **dict.fromkeys(("block_size", "blocksize"), "group_size"),
    **dict.fromkeys(("pot_scale", "power_of_two"), "pow2_scale"),
    **dict.fromkeys(("narrow_range", "symmetric_range"), "narrow"),
    "symmetry": "symmetric",
    "calib_method": "observer",
    "is_dynamic": "dynamic",
}


def _of_type(dtype: object) -> str:
    name = str(dtype).removeprefix("torch.")
    integers = re.fullmatch(r"q?(u?)int(\d+)", name)
    if integers is not None:
        return f"bits={integers[2]}, signed={not integers[1]}"
    return f"format={FORMATS[name]!r}" if name in FORMATS else "bits=8 for integers, format='e4m3' for small floats"


TRANSLATED: Mapping[str, Callable[[object], str]] = {
    "dtype": _of_type,
    "per_channel": lambda value: "axis=0" if value else "axis=None",
    "unsigned": lambda value: f"signed={not value}",
    "qscheme": lambda value: f"axis={0 if 'channel' in str(value) else None}, symmetric={'symmetric' in str(value)}",
    "granularity": lambda value: "axis=0 for a scale for each channel, and group_size for one for each group",
    "quant_min": lambda value: "bits, signed and narrow, which give the lowest quantized value",
    "quant_max": lambda value: "bits and signed, which give the highest quantized value",
}


def check_arguments(of: str, given: Mapping[str, object], known: Collection[str]) -> None:
    """Raise TypeError for keyword arguments of QuantSpec that it does not have, with the arguments to write instead.

    Example:
        >>> check_arguments("QuantSpec", {"num_bits": 4, "per_channel": True}, ["bits", "axis"])
        Traceback (most recent call last):
        ...
        TypeError: QuantSpec has no argument 'num_bits' and no 'per_channel'; write bits=4, axis=0.
    """
    absent = [name for name in given if name not in known]
    for name in absent:
        if name not in RENAMED and name not in TRANSLATED:
            raise TypeError(unknown(f"argument of {of}", name, known))
    if absent:
        ways = [
            TRANSLATED[name](given[name]) if name in TRANSLATED else f"{RENAMED[name]}={given[name]!r}"
            for name in absent
        ]
        names = " and no ".join(map(repr, absent))
        raise TypeError(f"{of} has no argument {names}; write {', '.join(dict.fromkeys(ways))}.")


# The arguments of functions that other tools call by another name, and those that say the same in another way. A name counts
# where the function has the argument.
SPECS = (
    "qconfig_mapping=QConfigMapping().set_global(QConfig(activation, weight)), each a QuantSpec, as QuantSpec(bits=4)"
)
OF_FUNCTIONS = {
    **dict.fromkeys(("num_batches", "n_batches", "num_steps", "calib_steps", "steps"), "max_batches"),
    **dict.fromkeys(("dataloader", "data_loader", "loader", "dataset", "calib_dataset", "data"), "batches"),
    **dict.fromkeys(("forward_loop", "calib_func", "run_fn", "forward_fn"), "forward"),
    **dict.fromkeys(("example_input", "inputs", "dummy_input", "sample_inputs", "args"), "example_inputs"),
    **dict.fromkeys(("target", "platform"), "backend"),
    **dict.fromkeys(("skip", "ignored_scope", "exclude_layers", "modules_to_not_convert"), "exclude"),
    **dict.fromkeys(("output_path", "output", "filename", "file", "f"), "path"),
    "opset_version": "opset",
}
SAID_OTHERWISE = {
    **dict.fromkeys(RENAMED, ("qconfig_mapping", SPECS)),
    **dict.fromkeys(("bits", "weights", "activations", "weight_bits", "w_bits"), ("qconfig_mapping", SPECS)),
    **dict.fromkeys(("activation_bits", "a_bits", "qconfig", "qspec", "dtype"), ("qconfig_mapping", SPECS)),
    "dynamic_axes": (
        "dynamic_batch",
        "dynamic_batch=True for batches of any size, or dynamic_shapes as torch.export takes them",
    ),
    "dynamo": ("exporter", 'exporter="dynamo" or exporter="torchscript"'),
}


def refuse_others(function: Callable[..., object], other: Mapping[str, object]) -> None:
    """Raise TypeError for keyword arguments that a function does not have, with the arguments to write instead.

    Example:
        >>> def calibrate(prepared, batches, max_batches=None):
        ...     pass
        >>> refuse_others(calibrate, {"num_batches": 8})
        Traceback (most recent call last):
        ...
        TypeError: calibrate has no argument 'num_batches'; write max_batches=8.
    """
    known = [name for name in inspect.signature(function).parameters if name != "other"]
    ways = []
    for name, value in other.items():
        renamed, (argument, way) = OF_FUNCTIONS.get(name), SAID_OTHERWISE.get(name, ("", ""))
        if renamed in known:
            ways.append(f"{renamed}={value!r}" if isinstance(value, int | float | str) else str(renamed))
        elif argument in known:
            ways.append(way)
        else:
            raise TypeError(unknown(f"argument of {function.__name__}", name, known))
    if ways:
        names = " and no ".join(map(repr, other))
        raise TypeError(f"{function.__name__} has no argument {names}; write {', '.join(dict.fromkeys(ways))}.")


def of_attribute(name: str, package: ModuleType, parts: Iterable[str]) -> str:
    """Return the sentence for a name that a package and its public `parts` do not have: what to write, or the nearest name."""
    absent = f"module {package.__name__!r} has no attribute {name!r}"
    if name in WAYS:
        return f"{absent}; write {WAYS[name]}."
    homes = [part for part in parts if name in getattr(getattr(package, part), "__all__", ())]
    if homes:
        return f"{absent}; write {package.__name__}.{homes[0]}.{name}."
    return absent if name.startswith("_") else f"{absent}: {unknown('name', name, package.__all__)}"


def say_when_called(package: str, way: str) -> None:
    """Let a call of a package, as if it were a function, raise TypeError that says what to write."""

    class Package(ModuleType):
        def __call__(self, *args: object, **kwargs: object) -> object:
            """Raise TypeError."""
            raise TypeError(f"{package} is a package and no function; write {way}.")

    sys.modules[package].__class__ = Package


# ---- a model, inputs and a path in another order


def in_order(**roles: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a function raise TypeError, with the right order, where its first arguments come in another one.

    The order of all functions is model, inputs, path. The roles name the arguments, in the order of the function: "model" (a
    module), "path" (text, a path or an onnx.ModelProto), "inputs" (others).

    Example:
        >>> @in_order(model="model", inputs="example_inputs", path="path")
        ... def write(model, example_inputs, path):
        ...     return type(model).__name__
        >>> write(nn.ReLU(), 3, "model.onnx")
        'ReLU'
        >>> write("model.onnx", nn.ReLU(), 3)
        Traceback (most recent call last):
        ...
        TypeError: write takes model, example_inputs and path in this order: write(model, example_inputs, path).
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        """Return the function with a check of its arguments."""
        names, known = list(roles.values()), inspect.signature(function).parameters
        order = " and ".join([", ".join(names[:-1]), names[-1]])
        message = f"{function.__name__} takes {order} in this order: {function.__name__}({', '.join(names)})."

        @functools.wraps(function)
        def checked(*args: P.args, **kwargs: P.kwargs) -> R:
            refuse_others(function, {name: value for name, value in kwargs.items() if name not in known})
            given = [roles.get(_role_of(value), "") for value in args[: len(names)]]
            each_once = "" not in given and len({*given, *kwargs}) == len(given) + len(kwargs)
            has_model = "model" not in roles or roles["model"] in {*given, *kwargs}  # if not, the function says so
            if given != names[: len(given)] and each_once and has_model:
                raise TypeError(message)
            return function(*args, **kwargs)

        return checked

    return decorate


def _role_of(value: object) -> str:
    if isinstance(value, nn.Module):
        return "model"
    is_path = isinstance(value, str | os.PathLike) or type(value).__name__ == "ModelProto"
    return "path" if is_path else "inputs"
