"""Learned quantizers: a trained range, a soft staircase, uneven levels, an interval of magnitudes, a trained scale.

Quantizers of inputs save the input and the parameters for backward. Double backward raises NotImplementedError.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtoolkit._native import Op, library
from qtoolkit.ops.integer import fake_quant
from qtoolkit.ops.recording import check_has_form
from qtoolkit.running import running

_fake_quant_shaped: Op = library.fake_quant_shaped.default
_positive_scale: Op = library.positive_scale.default
_float16_scale: Op = library.float16_scale.default


def fake_quant_clipped(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
    steepness: Tensor | None = None,
) -> Tensor:
    """Return the values of `fake_quant`, of the same arguments, with the gradients of a range that is trained.

    The range is from `(qmin - zero_point) * scale` to `(qmax - zero_point) * scale`. The gradient in x passes inside, judged
    before rounding; an element beyond a bound moves with the bound, and rounding moves nothing. This is the gradient of PACT
    (arXiv 1805.06085) and of TensorFlow's fake_quant_with_min_max_vars.

    With a steepness k (as many elements as scale, positive), the gradient of x inside the range is the slope of the soft
    staircase of DSQ (arXiv 1908.05033), whose stairs are the steps: `(tanh(k (f - 1/2)) / tanh(k / 2) + 1) / 2` at f in [0, 1]
    of a step. In the paper's terms, `k = log(2 / alpha - 1)`. Without one it is straight-through.

    Raises:
        ValueError: A shape, axis, range, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> x, scale = torch.tensor([-9.0, 0.6, 1.2, 9.0], requires_grad=True), torch.tensor(0.5, requires_grad=True)
        >>> y = fake_quant_clipped(x, scale, qmin=-2, qmax=2)
        >>> y
        tensor([-1.0000,  0.5000,  1.0000,  1.0000], grad_fn=...)
        >>> y.sum().backward()
        >>> x.grad, scale.grad  # -2 + 2 + 2: two elements lie above the range, whose highest value is 1.0
        (tensor([0., 1., 0., 0.]), tensor(2.))
    """
    if running().for_onnx:
        return fake_quant(x, scale, zero_point, qmin, qmax, axis, group, block_size)
    return _fake_quant_shaped(x, scale, zero_point, steepness, qmin, qmax, "clip", (), axis, group, block_size)


def fake_quant_levels(
    x: Tensor,
    scale: Tensor,
    levels: Sequence[int],
    signed: bool = True,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
) -> Tensor:
    """Round x to the nearest of levels that are multiples of a scale, such as sums of powers of two (APoT, arXiv 1909.13144).

    The gradient in x passes up to the highest level, judged before rounding. Scale has the gradient `level - x / scale` inside
    and the level outside.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        scale: The unit of the levels; see the package's docstring for its shape.
        levels: 2 to 32 magnitudes below 2**24, ascending from 0. Halfway between two, the lower one is taken.
        signed: Whether negative x takes the negative levels; else it takes 0.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share a scale, or 0 for no blocks.

    Returns:
        A tensor with the shape, dtype and memory format of x.

    Raises:
        ValueError: The levels, or a shape, axis, group, block size or device, do not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> fake_quant_levels(torch.tensor([0.9, -4.8, 5.1, 99.0]), torch.tensor(1.0), [0, 1, 2, 3, 4, 6, 8, 10])
        tensor([ 1., -4.,  6., 10.])
    """
    most = levels[-1] if levels else 1
    check_has_form("a grid of levels that are not uniform (quantizer='apot')")
    return _fake_quant_shaped(
        x, scale, None, None, -most if signed else 0, most, "levels", levels, axis, group, block_size
    )


def interval(
    x: Tensor,
    center: Tensor,
    distance: Tensor,
    signed: bool = True,
    axis: int | None = None,
    group: int = 1,
    block_size: int = 0,
) -> Tensor:
    """Map an interval of magnitudes to [0, 1], with the sign of x: the transform of QIL (arXiv 1808.05779) with gamma = 1.

    Magnitudes below `center - distance` become 0 and those above `center + distance` 1. Nothing is rounded.

    Args:
        x: Input of any shape; float32, float64, bfloat16 or float16.
        center: The center of the interval; as many elements as distance.
        distance: The distance of its bounds from the center, positive; the shape of a scale, see the package's docstring.
        signed: Whether negative x takes the place of its magnitude, with its sign; else it is below the interval.
        axis: Channel axis, or None for per tensor.
        group: Groups of dimension 0.
        block_size: Elements along the axis that share an interval, or 0 for no blocks.

    Returns:
        A tensor with the shape, dtype and memory format of x.

    Raises:
        ValueError: A shape, axis, group, block size or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> interval(torch.tensor([0.1, 0.5, -0.625, 2.0]), torch.tensor(0.5), torch.tensor(0.25))
        tensor([ 0.0000,  0.5000, -0.7500,  1.0000])
    """
    check_has_form("an interval of magnitudes (quantizer='qil')")
    return _fake_quant_shaped(
        x, distance, center, None, -1 if signed else 0, 1, "interval", (), axis, group, block_size
    )


def positive_scale(start: Tensor, ratio: Tensor, rate: Tensor | None = None) -> Tensor:
    """Return start * max(|ratio|, 2**-24), positive for every ratio, to train a scale by its ratio to a start.

    An optimizer with steps of a fixed size, such as Adam, changes scales of all sizes by the same factor. The gradient of
    ratio is divided by start squared, so that a step of SGD changes the scale as if the scale itself were the parameter
    (with momentum and weight decay too), or as if scale / sqrt(rate) were.

    Args:
        start: Scales at the start of training, positive; float32 or float64, any shape.
        ratio: Ratios of the scales to `start`, of the same dtype and number of elements.
        rate: Factors of the gradients of `ratio`, of the same dtype and number of elements; None: 1.

    Returns:
        A tensor of start's shape.

    Raises:
        ValueError: The number of elements or the device differs.
        TypeError: A dtype does not fit.
        NotImplementedError: start or rate requires grad.

    Example:
        >>> ratio = torch.tensor([1.0], requires_grad=True)
        >>> scale = positive_scale(torch.tensor(0.5), ratio)
        >>> scale.backward()
        >>> scale, ratio.grad
        (tensor(0.5000, grad_fn=...), tensor([2.]))
        >>> positive_scale(torch.tensor(0.5), torch.tensor([-0.1]))
        tensor(0.0500)
    """
    if running().for_onnx:
        return start * ratio.reshape(start.shape).abs().clamp(min=2.0**-24)
    return _positive_scale(start, ratio, rate)


def float16_scale(scale: Tensor) -> Tensor:
    """Return scales as numbers of float16, for a target whose scales have this type, in their own dtype.

    They are the nearest numbers of 11 significant bits, ties to even, and at least 2**-14, below which the numbers of float16
    have fewer bits. Scales above 65,504, the largest number of float16, have 11 bits too: no file can have them, and
    `qtoolkit.calibrate` and `qtoolkit.convert` refuse them. The gradient passes straight through.

    Args:
        scale: Positive scales, float32 or float64, any shape. NaN and infinities stay.

    Raises:
        TypeError: The dtype is another one.

    Example:
        >>> [format(float(scale), ".6g") for scale in float16_scale(torch.tensor([0.1, 1e-6, 3000.7]))]
        ['0.0999756', '6.10352e-05', '3000']
    """
    if running().for_onnx:
        return scale.clamp(min=2.0**-14).to(torch.float16).to(scale.dtype)
    return _float16_scale(scale)
