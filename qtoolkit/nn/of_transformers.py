"""QAT layers of transformers. `qtoolkit.nn.registry` imports this module where transformers has been imported."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from qtoolkit.nn.weighted import QuantWeighted


class QuantTransformersConv1D(QuantWeighted, Conv1D):  # type: ignore[misc]  # its class has no types
    """The class Conv1D of the package transformers with quantizers: GPT-2's linear layer, whose weight is (in, out).

    Despite its name it is no convolution. Axis 1 of the weight, and so of `weight_spec`, runs along the output features. In
    training the layer computes the float simulation, also in a model that was prepared with `training_arithmetic="integer"`.

    Example:
        >>> layer = QuantTransformersConv1D(2, 4, weight_spec=qt.QuantSpec(axis=1))  # 2 outputs, 4 inputs
        >>> layer(torch.zeros(3, 4)).shape, layer.weight_quantizer.scale.shape
        (torch.Size([3, 2]), torch.Size([2]))
    """

    FLOAT = Conv1D
    KIND = "linear"
    OUTPUT_AXIS = 1
    __repr__ = nn.Module.__repr__  # with the quantizers

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}"

    def compute(self, x: Tensor, weight: Tensor, bias: Tensor | None, *args: Any, **kwargs: Any) -> Tensor:
        rows = x.reshape(-1, x.size(-1))
        y = torch.mm(rows, weight) if bias is None else torch.addmm(bias, rows, weight)
        return y.reshape(*x.shape[:-1], self.nf)

    def channels(self) -> int:
        return int(self.weight.size(1))

    def sum_per_output(self, values: Tensor) -> Tensor:
        return values.sum(0, dtype=torch.float64)

    def scale_output_channels(self, weight: Tensor, factor: Tensor) -> Tensor:
        return weight * factor

    def along_channels(self, values: Tensor) -> Tensor:
        return values

    def weight_groups(self) -> tuple[bool, int]:
        return True, 1
