"""Max pooling that keeps one byte for each element of its result."""

from collections.abc import Sequence

from torch import Tensor

from qtoolkit._native import TupleOp, library

_max_pool_offsets: TupleOp = library.max_pool_offsets.default

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
