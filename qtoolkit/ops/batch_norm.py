"""Batch norm in training with the ops after it, in one op."""

import math

from torch import Tensor

from qtoolkit._native import library

_batch_norm_fake_quant = library.batch_norm_fake_quant.default
_batch_norm_totals = library.batch_norm_totals.default
_batch_norm_track_ = library.batch_norm_track_.default
_batch_norm_rescale_ = library.batch_norm_rescale_.default


def batch_norm_fake_quant(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float = 1e-5,
    *,
    divisor: Tensor | None = None,
    residual: Tensor | None = None,
    residual_codes: Tensor | None = None,
    residual_scale: Tensor | None = None,
    residual_zero_point: Tensor | None = None,
    low: float = -math.inf,
    high: float = math.inf,
    slope: float = 0.0,
    scale: Tensor | None = None,
    zero_point: Tensor | None = None,
    qmin: int = -128,
    qmax: int = 127,
    grad_factor: float = 1.0,
    totals: Tensor | None = None,
    process_group: str | None = None,
    packs_codes: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Normalize x by the statistics of the batch, add a residual, apply an activation and fake-quantize.

    Each step but the first is optional. x is read twice, the result written once; backward keeps x, the numbers of each
    channel and the residual (as integers, if they are given), and computes the rest again. The arithmetic is float32
    (float64 for float64), without rounding to a 16-bit dtype between the steps. Two runs give the same bits, with any number
    of threads.

    Differentiable in x, weight, bias, divisor, residual, scale and zero_point; double backward raises NotImplementedError.
    The gradient of the activation is `slope` at and below `low` and 0 at and above `high`, as in torch; scale and
    zero_point have `fake_quant`'s.

    Args:
        x: (N, C, ...), with more than one value for each channel; float32, float64, bfloat16 or float16. A layout with gaps
            is copied.
        weight: (C), or None for 1.
        bias: (C), or None for 0.
        eps: Added to the variance.
        divisor: (C), not zero; the batch norm of x / divisor is computed, without the division. None for 1.
        residual: Added after the batch norm; of x's shape and dtype.
        residual_codes: The residual as int8 or uint8, which backward keeps and rebuilds it from:
            `(residual_codes - residual_zero_point) * residual_scale`, rounded to x's dtype, must equal the residual. The
            result takes the residual itself, since integers have no NaN.
        residual_scale: Scale of `residual_codes`, one element.
        residual_zero_point: Zero point of `residual_codes`, one element, or None for 0.
        low: The activation below: `low + slope * (v - low)`. ReLU is (0, inf, 0), ReLU6 (0, 6, 0), LeakyReLU (0, inf, a).
        high: The activation's highest value.
        slope: Slope of the activation below `low`.
        scale: Step size, one element; None for no quantization.
        zero_point: Integer that zero maps to, one element, or None for 0.
        qmin: Lowest quantized value.
        qmax: Highest quantized value.
        grad_factor: Factor of the gradients of scale and zero_point.
        totals: The result of `batch_norm_totals` for x, divisor and the process group; x may then have any number of values.
        process_group: The name of the process group whose ranks share their statistics: backward adds up their gradients of
            weight and bias for x's gradient, so all of them must call it. The gradients that it returns of other arguments are
            this rank's.
        packs_codes: Whether integers that fit in 4 bits are two a byte, as `qtoolkit.ops.layer.Codes` has them. They
            are empty where their order is not the result's in memory, and for images in rows with an odd H * W.

    Returns:
        The result, with the shape, dtype and memory format of x; its integers (int8 if `qmin` is negative, else uint8; empty if
        they do not fit or there is no scale); and the mean and the biased variance of each channel of x, float32 (float64 for
        float64), of all ranks of a process group. Only the result is differentiable.

    Raises:
        ValueError: A shape, range or device does not fit, or without totals a channel has fewer than two values.
        TypeError: A dtype does not fit.

    Example:
        >>> x = torch.tensor([[1.0, -4.0], [3.0, 4.0]])
        >>> y, codes, mean, variance = batch_norm_fake_quant(x, None, None, low=0.0, scale=torch.tensor(0.5), qmin=0, qmax=255)
        >>> y
        tensor([[0., 0.],
                [1., 1.]])
        >>> codes.dtype, mean, variance
        (torch.uint8, tensor([2., 0.]), tensor([ 1., 16.]))
    """
    of_residual = (residual, residual_codes, residual_scale, residual_zero_point)
    of_grid = (scale, zero_point, (qmin, qmax), grad_factor)
    found: tuple[Tensor, Tensor, Tensor, Tensor] = _batch_norm_fake_quant(
        x, weight, bias, divisor, *of_residual, eps, (low, high, slope), *of_grid, totals, process_group, packs_codes
    )
    return found


def batch_norm_totals(
    x: Tensor, process_group: str | None = None, *, divisor: Tensor | None = None, offset: Tensor | None = None
) -> Tensor:
    """Return the sums of which the statistics of several processes consist.

    With a process group this is one all-reduce, which every rank must call, also one whose batch is empty. Ranks may have
    different numbers of values.

    Args:
        x: (N, C, ...), of any size; float32, float64, bfloat16 or float16.
        process_group: The name of a group of torch.distributed (`group.group_name`), or None for this process alone.
        divisor: (C), not zero: the sums are of `x / divisor`. None for 1.
        offset: (C), or None for 0: ranks exchange the sums of `x / divisor + offset`. So one of them may give that as its x,
            and another one its x with these arguments.

    Returns:
        (2, 2 C + 1) float64: the sums of each channel's values, the sums of their squares, and the number of values of a
        channel; in row 0 of all ranks, in row 1 of this one.

    Raises:
        ValueError: A shape or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> batch_norm_totals(torch.tensor([[1.0, -4.0], [3.0, 4.0]]))
        tensor([[ 4.,  0., 10., 32.,  2.],
                [ 4.,  0., 10., 32.,  2.]], dtype=torch.float64)
    """
    found: Tensor = _batch_norm_totals(x.detach(), divisor, offset, process_group)
    return found


def batch_norm_track_(
    running_mean: Tensor,
    running_var: Tensor,
    mean: Tensor,
    variance: Tensor,
    momentum: float,
    count: int,
    *,
    divisor: Tensor | None = None,
    offset: Tensor | None = None,
    totals: Tensor | None = None,
) -> None:
    """Move running statistics towards a batch's, as a batch norm in training does.

    They take in the batch of `x / divisor + offset`, where mean and variance are x's. The running variance is the
    unbiased one: `variance * count / (count - 1)`.

    Args:
        running_mean: (C), changed in place; float32, float64, bfloat16 or float16.
        running_var: (C), changed in place, of the same dtype.
        mean: (C), the mean that `batch_norm_fake_quant` returned.
        variance: (C), the biased variance that it returned.
        momentum: Weight of the batch, in [0, 1].
        count: Number of values of a channel, more than 1: `x.numel() // x.size(1)`.
        divisor: (C), or None for 1.
        offset: (C), or None for 0.
        totals: The result of `batch_norm_totals`, whose number of values then replaces `count`.

    Raises:
        ValueError: A shape, number or device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> running_mean, running_var = torch.zeros(1), torch.ones(1)
        >>> batch_norm_track_(running_mean, running_var, torch.tensor([2.0]), torch.tensor([3.0]), 0.1, 4)
        >>> running_mean, running_var
        (tensor([0.2000]), tensor([1.3000]))
    """
    _batch_norm_track_(running_mean, running_var, mean, variance, divisor, offset, momentum, count, totals)


def batch_norm_rescale_(
    start: Tensor | None,
    rate: Tensor | None,
    known: Tensor | None,
    variance: Tensor,
    gamma: Tensor | None,
    eps: float,
    held: Tensor | None = None,
    taken: Tensor | None = None,
    clock: Tensor | None = None,
) -> Tensor:
    """Let the scales of a weight take the factor by which folding a batch norm multiplies the weight.

    The weight is quantized times the factor gamma / sqrt(variance + eps), where a zero is 1. So scales in units of the weight
    change with its magnitude: `start` is multiplied by the present magnitude / the known one, and `rate` by the square of that.
    The known magnitude is then the present one. Where it was 0, the scales are for the running variance; where the
    variance is NaN, no scale changes. Magnitudes beyond
    [2^-30, 2^30] count as these bounds.

    With the last three arguments the factor takes a variance which holds for a step of the training: the running one
    at the first call after the clock has moved. Nothing waits for the device.

    Args:
        start: A scale for each output channel, or one for all, changed in place; float32 or float64. One for all takes the
            root of the mean square of the channels' magnitudes. None for no scales: then `rate` and `known` are None.
        rate: The `rate` of `positive_scale`, of the same shape and dtype, changed in place, or None.
        known: The magnitudes that the scales have taken, of the same shape and dtype, changed in place; 0 for none.
        variance: (C), the running variance.
        gamma: (C), the batch norm's weight, or None for 1.
        eps: The batch norm's.
        held: (C), the variance of the present step, like `variance`, changed in place.
        taken: The clock's value when `held` was taken, one element, int64, changed in place.
        clock: The clock, one element, int64.

    Returns:
        A copy of the variance, of `held` where that is given.

    Raises:
        ValueError: A shape or a device does not fit.
        TypeError: A dtype does not fit.

    Example:
        >>> scale, known = torch.tensor([0.1]), torch.zeros(1)
        >>> for variance in (4.0, 4.0, 1.0):
        ...     _ = batch_norm_rescale_(scale, None, known, torch.tensor([variance]), None, 0.0)
        >>> scale, known
        (tensor([0.2000]), tensor([1.]))
    """
    found: Tensor = _batch_norm_rescale_(start, rate, known, variance, gamma, eps, held, taken, clock)
    return found
