"""PReLU with a quantizer behind it, in one op."""

from torch import Tensor

from qtoolkit._native import Op, library

_prelu_fake_quant: Op = library.prelu_fake_quant.default


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

    Values and the gradient of x are those of the two ops, bit for bit, where x is float32 or float64. There is no rounding to a
    16-bit dtype between them. The sums of the gradients of weight and scale are float64. PReLU is that of arXiv 1502.01852:
    x above 0, weight * x elsewhere. The gradient of scale is the one of `fake_quant`.

    Args:
        x: Any shape; (N, C, ...) where weight has more than one element. float32, float64, bfloat16 or float16.
        weight: The slopes below 0: one element, or (C).
        scale: Step between codes, one element.
        zero_point: Code that zero maps to, one element, or None for 0. It has no gradient.
        qmin: Lowest code.
        qmax: Highest code.
        grad_factor: Factor of the gradient of scale.

    Raises:
        TypeError: A tensor is not floating point.
        ValueError: A shape, a range of codes or a device does not fit.
        NotImplementedError: The zero point requires grad; double backward; forward-mode AD; torch.func's gradient transforms.

    Example:
        >>> x = torch.tensor([[-8.0, 1.3], [0.4, -2.0]])
        >>> prelu_fake_quant(x, torch.tensor([0.25, 0.1]), torch.tensor(0.5))
        tensor([[-2.0000,  1.5000],
                [ 0.5000,  0.0000]])
    """
    return _prelu_fake_quant(x, weight, scale, zero_point, qmin, qmax, grad_factor)
