"""Ops that torch's exporters refuse or silently change because ONNX lacks them, such as pools with `divisor_override`."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from qtoolkit.nn.quantized_attention import without_keys
from qtoolkit.runtimes.execution import Array

Function = Callable[..., Any]
Size = int | Sequence[int]
DIMENSIONS: Mapping[Function, int] = {F.avg_pool2d: 2, F.avg_pool3d: 3}
ADAPTIVE: Mapping[Function, int] = {
    torch.adaptive_avg_pool1d: 1, F.adaptive_avg_pool2d: 2, F.adaptive_avg_pool3d: 3,
    F.adaptive_max_pool1d: 1, F.adaptive_max_pool2d: 2, F.adaptive_max_pool3d: 3,
    F.adaptive_max_pool1d_with_indices: 1, F.adaptive_max_pool2d_with_indices: 2, F.adaptive_max_pool3d_with_indices: 3,
}  # fmt: skip

# Of the pools with windows: their dimensions, and the position of `ceil_mode`.
WINDOWED: Mapping[Function, tuple[int, int]] = {
    F.avg_pool1d: (1, 4), F.avg_pool2d: (2, 4), F.avg_pool3d: (3, 4),
    F.max_pool1d: (1, 5), F.max_pool2d: (2, 5), F.max_pool3d: (3, 5),
}  # fmt: skip

WINDOW = ("input", "kernel_size", "stride", "padding", "dilation")
"""The first arguments of a pool with windows; an average pool has no dilation."""

USUAL_THRESHOLD = 20  # of a softplus, beyond which it is its input: the difference is below the steps of float32


class OpsWritten(TorchFunctionMode):
    """Replace ops that ONNX lacks while exporters record a model, and note the ones without a replacement.

    - A pool with `divisor_override` becomes an average pool times a factor. With `ceil_mode` too it raises ValueError: the
      windows at the edge would need other factors.
    - A `ceil_mode` that adds no window is dropped: ONNX would add a window in the padding.
    - The windows of an adaptive pool, and of a resize in the mode "area", depend on the size of the input, but exporters write
      the windows of the example inputs. `constant_sizes` says that sizes are static, which torch.jit.trace does not tell.
    - The logarithm of a sigmoid and logaddexp are written by softplus, which overflows nowhere.
    - A softplus with a threshold becomes a choice of two tensors ("torchscript" drops the threshold).
    - An LSTM with `proj_size` raises ValueError ("dynamo" drops the projection).
    - A nearest-pixel resize for which the file would round to other pixels becomes an indexing op.
    - An attention without heads gets one head ("dynamo" requires it), and returns zeros for a query whose keys are all masked
      (exporters write the mean of the values).

    Errors begin with `what`.
    """

    def __init__(self, what: str, constant_sizes: bool) -> None:
        super().__init__()
        self.what, self.constant_sizes = what, constant_sizes
        self._follows_sizes: list[str] = []

    def __torch_function__(self, function: Function, types: object, args: Any = (), kwargs: Any = None) -> object:
        """Call a function of torch."""
        named = kwargs or {}
        if function in WINDOWED:
            args, named = self._with_needed_ceil_mode(function, args, named)
        if function in DIMENSIONS:
            return self._pool(function, *args, **named)
        if function in ADAPTIVE:
            self._note_pool(ADAPTIVE[function], *args, **named)
        elif function is F.logsigmoid:  # exporters write Log(Sigmoid(x)), which is -inf for x below -17
            return -F.softplus(-(args[0] if args else named["input"]))
        elif function in (torch.logaddexp, Tensor.logaddexp):  # exporters write Log(Exp(a) + Exp(b)), which overflows
            return self._logaddexp(*args, **named)
        elif function is F.softplus:
            return self._softplus(*args, **named)
        elif function is F.scaled_dot_product_attention:
            return self._attention(*args, **named)
        elif function is F.interpolate:
            return self._resize(*args, **named)
        elif function is torch.lstm:
            self._check_states(*args, **named)
        return function(*args, **named)

    def _note_pool(
        self, dimensions: int, input: Tensor, output_size: int | Sequence[int | None] | None, *_: object, **__: object
    ) -> None:
        size = output_size if isinstance(output_size, tuple | list) else [output_size] * dimensions
        pooled = (length for length, to in zip(input.shape[-dimensions:], size, strict=True) if to is not None)
        if any(to != 1 for to in size) and any(isinstance(length, torch.SymInt) for length in pooled):
            self._follows_sizes.append(f"an adaptive pool to {output_size}")

    def _check_states(self, _: Tensor, states: object, *__: object) -> None:
        """Raise ValueError for an LSTM with `proj_size`; a packed sequence has batch sizes in place of the states."""
        if isinstance(states, tuple | list) and states[0].shape[-1] != states[1].shape[-1]:
            raise ValueError(
                f"{self.what}: an LSTM with proj_size={int(states[0].shape[-1])} cannot be expressed in ONNX; quantize the "
                "layer, which is then written step by step, or set proj_size=0 and add a Linear after it."
            )

    def check(self) -> None:
        """Raise ValueError if a window that was written as a constant depends on a dynamic size."""
        if self._follows_sizes:
            raise ValueError(
                f"{self.what}: {self._follows_sizes[0]} has windows that depend on a dynamic input size, which ONNX does not "
                "support; make that dimension static, pool to one value (x.mean((2, 3), keepdim=True)), or resize with "
                "torch.nn.functional.interpolate in the mode 'bilinear'."
            )

    def _logaddexp(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.maximum(input, other) + F.softplus(-(input - other).abs())

    def _softplus(self, input: Tensor, beta: float = 1, threshold: float = USUAL_THRESHOLD) -> Tensor:
        y = F.softplus(input, beta)
        return y if threshold == USUAL_THRESHOLD else torch.where(input * beta > threshold, input, y)

    def _attention(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> Tensor:
        if {query.dim(), key.dim(), value.dim()} != {3}:
            y = F.scaled_dot_product_attention(query, key, value, attn_mask, dropout_p, is_causal, **options)
        else:
            mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
            q, k, v = (each.unsqueeze(1) for each in (query, key, value))
            y = F.scaled_dot_product_attention(q, k, v, mask, dropout_p, is_causal, **options).squeeze(1)
        return y if attn_mask is None else y.masked_fill(without_keys(attn_mask), 0.0)

    def _resize(
        self, input: Tensor, size: Any = None, scale_factor: Any = None, mode: str = "nearest", *args: Any, **named: Any
    ) -> Tensor:
        """Return a resized image; pixels are indexed if ONNX's Resize would choose other nearest pixels.

        Resize divides by the scale in float32, and torch multiplies by its inverse: with 16 of 56 pixels, 2 / 0.285714 is below
            7.
        """
        if mode == "area" and any(isinstance(length, torch.SymInt) for length in input.shape[2:]):
            self._follows_sizes.append("a resize in the mode 'area'")
        y = F.interpolate(input, size, scale_factor, mode, *args, **named)
        lengths = [*zip(input.shape[2:], y.shape[2:], strict=True)]
        if mode != "nearest" or any(isinstance(length, torch.SymInt) for pair in lengths for length in pair):
            return y
        factors = scale_factor if isinstance(scale_factor, tuple | list) else [scale_factor] * len(lengths)
        if named.get("recompute_scale_factor") or (len(args) > 1 and args[1]):
            factors = [None] * len(lengths)
        chosen = [_nearest(int(old), int(new), factor) for (old, new), factor in zip(lengths, factors, strict=True)]
        if all(np.array_equal(ours, theirs) for ours, theirs in chosen):
            return y
        for dim, (ours, _) in enumerate(chosen, 2):
            input = input.index_select(dim, torch.tensor(ours.tolist(), device=input.device))
        return input

    def _pool(
        self,
        pool: Callable[..., Tensor],
        input: Tensor,
        kernel_size: Size,
        stride: Size | None = None,
        padding: Size = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        divisor_override: int | None = None,
    ) -> Tensor:
        if divisor_override is None:
            return pool(input, kernel_size, stride, padding, ceil_mode, count_include_pad)
        if ceil_mode:
            raise ValueError(
                f"{self.what}: an average pool with divisor_override={divisor_override} and ceil_mode=True cannot be expressed "
                "in ONNX; pad its input with torch.nn.functional.pad, and set ceil_mode=False."
            )
        window = [kernel_size] if isinstance(kernel_size, int) else kernel_size
        factor: float = math.prod(window) ** (DIMENSIONS[pool] // len(window)) / divisor_override
        return pool(input, kernel_size, stride, padding) * factor

    def _with_needed_ceil_mode(
        self, pool: Callable[..., Tensor], args: tuple[Any, ...], named: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        """Return a pool's arguments, without `ceil_mode` if the sizes are known and the output has the same size without it."""
        dimensions, position = WINDOWED[pool]
        given = (*args[:position], False, *args[position + 1 :]) if len(args) > position else args
        more = named if len(args) > position else {**named, "ceil_mode": False}
        of_window = {**dict(zip(WINDOW, args[:position], strict=False)), **named}
        sizes = of_window["input"].shape[-dimensions:]
        # A traced size is a tensor.
        known = all(isinstance(size, int) or (self.constant_sizes and isinstance(size, Tensor)) for size in sizes)
        return (given, more) if known and not _needs_ceil_mode([*map(int, sizes)], **of_window) else (args, named)


def _needs_ceil_mode(
    sizes: Sequence[int],
    kernel_size: Size,
    stride: Size | None = None,
    padding: Size = 0,
    dilation: Size = 1,
    **_: object,
) -> bool:
    """Return whether a pool with `ceil_mode` has more windows. Source: aten/src/ATen/native/Pool.h, pooling_output_shape."""
    count = len(sizes)
    steps = stride or kernel_size  # an empty stride too is the kernel's size
    windows = (_each(value, count) for value in (kernel_size, steps, padding, dilation))
    for length, kernel, step, pad, apart in zip(sizes, *windows, strict=True):
        rest = length + 2 * pad - apart * (kernel - 1) - 1
        more = -(-rest // step)
        if rest // step != (more - 1 if more * step >= length + pad else more):
            return True
    return False


def _each(value: Size, count: int) -> Sequence[int]:
    values = value if isinstance(value, tuple | list) else (value,)
    return values if len(values) == count else values * count


def _nearest(old: int, new: int, factor: float | None) -> tuple[Array, Array]:
    """Return the pixels that torch and Resize choose. Source: aten/src/ATen/native/UpSample.h, nearest_idx."""
    places = np.arange(new, dtype=np.float32)
    step = np.float32(1 / factor) if factor else np.float32(old) / np.float32(new)
    scale = np.float32(factor) if factor else np.float32(new) / np.float32(old)
    exact = np.arange(new) // (new // old) if new in (old, 2 * old) else np.floor(places * step)
    return np.minimum(exact, old - 1).astype(np.int64), np.minimum(np.floor(places / scale), old - 1).astype(np.int64)
