"""An op that compiled code needs besides the formulas."""

from torch import Tensor

from qtoolkit._native import Op, library

_snapshot: Op = library.snapshot.default


def snapshot(x: Tensor) -> Tensor:
    """Return a detached copy of x, which compilers save for backward and never recompute.

    Without it, torch.compile's partitioner recomputes values in backward from buffers that the forward has updated in
    place (batch norm's statistics on torch 2.13 and 2.14, for example: wrong gradients under inductor).

    Example:
        >>> x = torch.zeros(2)
        >>> before = snapshot(x)
        >>> x.add_(1), before
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    return _snapshot(x)
