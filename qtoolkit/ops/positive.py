"""The scale of a learned quantizer."""

from torch import Tensor

from qtoolkit._native import Op, library
from qtoolkit.ops.recording import is_recorded_for_onnx

_positive_scale: Op = library.positive_scale.default


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
    if is_recorded_for_onnx():
        return start * ratio.reshape(start.shape).abs().clamp(min=2.0**-24)
    return _positive_scale(start, ratio, rate)
