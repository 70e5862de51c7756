"""The arithmetic of runtimes on codes; csrc/requantize.h has the formulas and their sources."""

from torch import Tensor

from qtoolkit._native import Op, library

_add_codes: Op = library.add_codes.default
_centred_codes: Op = library.centred_codes.default
_fake_quant_by_factor: Op = library.fake_quant_by_factor.default
_requantize: Op = library.requantize.default
_fake_quant_away: Op = library.fake_quant_away.default
_hard_swish_codes: Op = library.hard_swish_codes.default
_resize_linear_codes: Op = library.resize_linear_codes.default
_average_codes: Op = library.average_codes.default
_softmax_codes: Op = library.softmax_codes.default
_requantize_fixed_point: Op = library.requantize_fixed_point.default


def requantize(
    x: Tensor,
    factor: Tensor | None,
    scale: Tensor,
    qmin: int,
    qmax: int,
    offset: Tensor | None = None,
    zero_code: int = 0,
    fused: bool = False,
) -> Tensor:
    """Return the values of the codes `round(x * factor + offset) - zero_code`, clamped, on the grid of a scale.

    Args:
        x: Sums, or other results, float32 or float64; rounded to float32 first.
        factor: What x is multiplied by, broadcast to x; None divides x by the scale.
        scale: The step of the result, one element.
        qmin: The lowest code minus the zero point.
        qmax: The highest.
        offset: What is added before rounding, one element; None adds zero_code.
        zero_code: The zero point that is subtracted after rounding.
        fused: Whether the product is not rounded before the offset is added.

    Returns:
        A float32 tensor with the shape and memory format of x.

    Example:
        >>> requantize(torch.tensor([5.0, 90.0]), torch.tensor(0.1), torch.tensor(2.0), -8, 7)
        tensor([ 0., 14.])
    """
    return _requantize(x, factor, scale, qmin, qmax, offset, zero_code, fused)


def requantize_fixed_point(
    x: Tensor,
    factor: Tensor,
    scale: Tensor,
    qmin: int,
    qmax: int,
    count: int = 1,
    rounded_once: bool = False,
) -> Tensor:
    """Return the values of the codes `x * factor`, rounded as LiteRT's reference kernels do, on the grid of a scale.

    The factor becomes 31 bits times a power of two. The product with the 31 bits is rounded, and that with the power again,
    halves away from zero.

    Args:
        x: Integers of less than 2^31, float32 or float64.
        factor: What x is multiplied by, float64, positive, broadcast to x.
        scale: The step of the result, one element.
        qmin: The lowest code minus the zero point.
        qmax: The highest.
        count: By what the 31 bits are divided, rounded down, as those of a mean of so many codes; less than 2^20.
        rounded_once: Whether the product with both is rounded once, halves up, as in fully connected layers.

    Returns:
        A float32 tensor with the shape and memory format of x.

    Example:
        >>> requantize_fixed_point(torch.tensor([5.0, 90.0]), torch.tensor(0.1), torch.tensor(2.0), -8, 7)
        tensor([ 2., 14.])
    """
    return _requantize_fixed_point(x, factor, scale, qmin, qmax, count, rounded_once)


def add_codes(
    x: Tensor,
    x_scale: Tensor,
    x_zero_point: int,
    other: Tensor,
    other_scale: Tensor,
    other_zero_point: int,
    scale: Tensor,
    zero_point: int,
    qmin: int,
    qmax: int,
    fixed_point: bool = False,
    rounded_twice: bool = False,
    subtract: bool = False,
) -> Tensor:
    """Return the sum of two tensors of values on grids, on the grid of its own scale.

    Args:
        x: The one tensor.
        x_scale: Its step, one element.
        x_zero_point: Its zero point.
        other: The other tensor, which broadcasts with x.
        other_scale: Its step.
        other_zero_point: Its zero point.
        scale: The step of the sum, one element.
        zero_point: The sum's zero point.
        qmin: The sum's lowest code minus its zero point.
        qmax: The highest.
        fixed_point: Whether XNNPACK's kernel is meant, which has factors of 21 bits; else onnxruntime's.
        rounded_twice: Whether LiteRT's reference kernel is meant, which has factors of 31 bits.
        subtract: Whether the other tensor is subtracted, by LiteRT's kernel.

    Returns:
        A float32 tensor.

    Example:
        >>> half = torch.tensor(0.5)
        >>> add_codes(torch.tensor([1.5, 60.0]), half, 0, torch.tensor([0.5]), half, 0, torch.tensor(1.0), 0, -8, 7)
        tensor([2., 7.])
    """
    grids = (x_scale, x_zero_point, other, other_scale, other_zero_point, scale, zero_point)
    return _add_codes(x, *grids, qmin, qmax, fixed_point, rounded_twice, subtract)


def fake_quant_by_factor(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Return `fake_quant` of one grid as OpenVINO computes it: x times a factor that the range gives.

    Example:
        >>> fake_quant_by_factor(torch.tensor([0.3, 9.0]), torch.tensor(0.25), None, -8, 7)
        tensor([0.2500, 1.7500])
    """
    return _fake_quant_by_factor(x, scale, zero_point, qmin, qmax)


def fake_quant_away(x: Tensor, scale: Tensor, zero_point: Tensor | None, qmin: int, qmax: int) -> Tensor:
    """Return `fake_quant` of one grid as LiteRT computes it: halves are rounded away from zero.

    Example:
        >>> fake_quant_away(torch.tensor([0.125, -0.375]), torch.tensor(0.25), None, -8, 7)
        tensor([ 0.2500, -0.5000])
    """
    return _fake_quant_away(x, scale, zero_point, qmin, qmax)


def centred_codes(x: Tensor, scale: Tensor) -> Tensor:
    """Return the codes minus the zero point of values on a grid with one scale: float64 for float64, else float32.

    Example:
        >>> centred_codes(torch.tensor([0.75, -0.5]), torch.tensor(0.25))
        tensor([ 3., -2.])
    """
    return _centred_codes(x, scale)


def softmax_codes(x: Tensor, scale: float, dim: int) -> Tensor:
    """Return softmax in steps of 1/256, 0 to 255, as LiteRT's reference kernel computes it.

    Args:
        x: Codes, integers as floats; a zero point may be subtracted.
        scale: Their step.
        dim: The dimension that sums to 1.

    Returns:
        A float32 tensor of the shape of x.

    Example:
        >>> softmax_codes(torch.tensor([[0.0, 0.0], [10.0, -10.0]]), 0.25, 1)
        tensor([[128., 128.],
                [254.,   2.]])
    """
    return _softmax_codes(x, scale, dim)


def hard_swish_codes(x: Tensor, x_scale: float, scale: float, qmin: int, qmax: int) -> Tensor:
    """Return codes of x relu6(x + 3) / 6, less the zero point, as LiteRT's reference kernel computes them.

    Args:
        x: Codes less their zero point, integers as floats.
        x_scale: Their step.
        scale: The step of the result.
        qmin: The lowest code of the result, less its zero point.
        qmax: The highest.

    Returns:
        A float32 tensor of the shape of x.

    Example:
        >>> hard_swish_codes(torch.tensor([-40.0, 0.0, 20.0]), 0.1, 0.05, -128, 127)
        tensor([ 0.,  0., 33.])
    """
    return _hard_swish_codes(x, x_scale, scale, qmin, qmax)


def average_codes(sums: Tensor, counts: Tensor) -> Tensor:
    """Return the codes of means, halves rounded away from zero, as LiteRT's reference kernel rounds them.

    Args:
        sums: Sums of codes with their zero point, integers as floats.
        counts: How many codes each sum has, of the shape of sums.

    Returns:
        A float32 tensor of the shape of sums.

    Example:
        >>> average_codes(torch.tensor([5.0, -6.0, 7.0]), torch.tensor([2.0, 4.0, 3.0]))
        tensor([ 3., -2.,  2.])
    """
    return _average_codes(sums, counts)


def resize_linear_codes(x: Tensor, size: tuple[int, int], align_corners: bool) -> Tensor:
    """Return the codes of images at another size, as LiteRT's reference kernel interpolates them.

    Args:
        x: Codes with their zero point, integers as floats, (N, C, H, W).
        size: Height and width of the result.
        align_corners: As in `torch.nn.functional.interpolate`.

    Returns:
        A float32 tensor.

    Example:
        >>> resize_linear_codes(torch.tensor([[[[0.0, 8.0]]]]), (1, 4), False)
        tensor([[[[0., 2., 6., 8.]]]])
    """
    return _resize_linear_codes(x, size, align_corners)
