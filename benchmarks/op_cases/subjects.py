"""The tensors that the ops are measured on."""

import torch
from torch import Tensor

QMIN, QMAX = -128, 127


class Subject:
    """A tensor with its scales: per tensor, per channel of an axis, or per channel of each group of dimension 0."""

    def __init__(self, x: Tensor, axis: int | None = None, group: int = 1) -> None:
        self.x, self.axis, self.group = x, axis, group
        count = 1 if axis is None else group * x.size(axis)
        self.scale = torch.rand(count, device=x.device) * 0.03 + 0.015
        shape = [count // group if d == axis else 1 for d in range(x.dim())]
        self.shaped = self.scale if axis is None else self.scale.view([group, *shape] if group > 1 else shape)
        self.grad = torch.randn_like(x)

    def split(self, x: Tensor) -> Tensor:
        """Return x with a dimension of groups in front, if there are any: it then broadcasts with `shaped`."""
        return x.unflatten(0, (self.group, -1)) if self.group > 1 else x

    def whole(self, x: Tensor) -> Tensor:
        """Undo `split`."""
        return x.flatten(0, 1) if self.group > 1 else x


def image(device: str, count: int = 64) -> Tensor:
    return torch.randn(count, 256, 28, 28, device=device)


def weight(device: str) -> Tensor:
    return torch.randn(512, 512, 3, 3, device=device)


def deconv_weight(device: str) -> Tensor:
    """Return the weight of a transposed convolution of 4 groups, 512 channels in and 512 out: (in, out / groups, k, k)."""
    return torch.randn(512, 128, 4, 4, device=device)


def subjects(device: str, quick: bool) -> dict[str, Subject]:
    """Activations in both memory formats, weights, and sizes from 64 Ki to 64 Mi elements."""
    x, w = image(device), weight(device)
    named = {
        "12.8M NCHW, per tensor": Subject(x),
        "12.8M NCHW, axis 1": Subject(x, 1),
        "12.8M channels_last, axis 1": Subject(x.contiguous(memory_format=torch.channels_last), 1),
        "12.8M bfloat16, per tensor": Subject(x.bfloat16()),
        "12.8M bfloat16, axis 1": Subject(x.bfloat16(), 1),
        "weight 2.4M, axis 0": Subject(w, 0),
        "weight 2.4M, axis 1": Subject(w, 1),
        "deconv weight 1.0M, axis 1, 4 groups": Subject(deconv_weight(device), 1, 4),
        "64 Ki, per tensor": Subject(torch.randn(1 << 16, device=device)),
        "1 Mi, per tensor": Subject(torch.randn(1 << 20, device=device)),
    }
    if not quick:
        named["64 Mi, per tensor"] = Subject(torch.randn(1 << 26, device=device))
    return named


def observed(device: str, count: int = 32) -> Tensor:
    return torch.randn(count, 64, 56, 56, device=device)
