"""What compiled code needs beside the formulas."""

from torch import Tensor

from qtoolkit._native import library

_snapshot = library.snapshot.default


def snapshot(x: Tensor) -> Tensor:
    """Return a copy of x as it is now, detached, which compilers keep for backward and never compute again.

    torch.compile's partitioner otherwise computes values anew in backward from buffers that the forward has updated in
    place since (seen with batch norm's statistics on torch 2.13 and 2.14: wrong gradients under inductor).

    Example:
        >>> x = torch.zeros(2)
        >>> before = snapshot(x)
        >>> x.add_(1), before
        (tensor([1., 1.]), tensor([0., 0.]))
    """
    copy: Tensor = _snapshot(x)
    return copy
