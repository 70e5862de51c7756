"""Ops between layers: max pooling, PReLU with a quantizer after it, and the copy that compilers need."""

from collections.abc import Sequence

from torch import Tensor

from qtoolkit._native import Op, TupleOp, library

_max_pool_offsets: TupleOp = library.max_pool_offsets.default
_prelu_fake_quant: Op = library.prelu_fake_quant.default
_snapshot: Op = library.snapshot.default

Sides = int | Sequence[int]


def max_pool(
    x: Tensor,
    kernel_size: Sides,
    stride: Sides | None = None,
    padding: Sides = 0,
    dilation: Sides = 1,
    ceil_mode: bool = False,
) -> Tensor:
    """Return `torch.nn.functional.max_pool2d`, with the same values and gradients bit for bit.

    For backward it keeps the place of the largest element in each window, one byte an element of the result, and not x. So
    a window has at most 256 elements. Double backward raises NotImplementedError.

    Args:
        x: (N, C, H, W) or (C, H, W); float32, float64, bfloat16 or float16.
        kernel_size: Height and width of the window, or one number for both; as in the other arguments.
        stride: Steps between windows; None for `kernel_size`.
        padding: Rows and columns of padding on each side, at most half of the kernel size.
        dilation: Steps between the elements of a window.
        ceil_mode: Whether the last window may reach past the end.

    Returns:
        A tensor with the dtype of x, contiguous or channels_last as x is.

    Raises:
        ValueError: A shape or number does not fit, or a window has more than 256 elements.
        TypeError: A dtype does not fit.

    Example:
        >>> x = torch.arange(16.0).view(1, 1, 4, 4)
        >>> max_pool(x, 2)
        tensor([[[[ 5.,  7.],
                  [13., 15.]]]])
    """
    sides = [_sides(s) for s in (kernel_size, kernel_size if stride is None else stride, padding, dilation)]
    return _max_pool_offsets(x, *sides, ceil_mode)[0]


def _sides(value: Sides) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def prelu_fake_quant(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    grad_factor: float = 1.0,
) -> Tensor:
    """Return `fake_quant(prelu(x, weight), scale, zero_point, qmin, qmax)`, with one read of x, which backward keeps.

    Values and the gradient of x are the two ops', bit for bit, where x is float32 or float64. There is no rounding to a
    16-bit dtype between them. The sums of the gradients of weight and scale are float64. PReLU is as in arXiv 1502.01852:
    x above 0, weight * x elsewhere. Scale has the gradient of `fake_quant`.

    Args:
        x: Any shape; (N, C, ...) where weight has more than one element. float32, float64, bfloat16 or float16.
        weight: The slopes below 0: one element, or (C).
        scale: Step size, one element.
        zero_point: Integer that zero maps to, one element, or None for 0. It has no gradient.
        qmin: Lowest quantized value.
        qmax: Highest quantized value.
        grad_factor: Factor of the gradient of scale.

    Raises:
        TypeError: A tensor is not floating point.
        ValueError: A shape, a range or a device does not fit.
        NotImplementedError: The zero point requires grad; double backward; forward-mode AD; torch.func's gradient transforms.

    Example:
        >>> x = torch.tensor([[-8.0, 1.3], [0.4, -2.0]])
        >>> prelu_fake_quant(x, torch.tensor([0.25, 0.1]), torch.tensor(0.5))
        tensor([[-2.0000,  1.5000],
                [ 0.5000,  0.0000]])
    """
    return _prelu_fake_quant(x, weight, scale, zero_point, qmin, qmax, grad_factor)


def snapshot(x: Tensor, *, changes: bool = False) -> Tensor:
    """Return a detached copy of x, that compilers save for backward and never recompute.

    Without it, torch.compile's partitioner recomputes values in backward from buffers that the forward has updated in
    place (batch norm's statistics on torch 2.13 and 2.14, for example: wrong gradients under inductor).

    Args:
        x: Any tensor.
        changes: Whether the forward that takes the copy changes x. A copy that gradient checkpointing takes again in
            backward would then be another one.

    Raises:
        RuntimeError: `changes` is set, and autograd's backward is running.

    Example:
        >>> x = torch.zeros(2)
        >>> before = snapshot(x)
        >>> x.add_(1), before
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    return _snapshot(x, changes)
