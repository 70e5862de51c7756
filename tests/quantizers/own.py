"""Quantizers that are not of the package: the one that docs/quantizers.md shows, and one with a formula of its own."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.quantizers.spec_ops import per_element
from qtoolkit.quantizers.table import QUANTIZERS, QuantizerKind


def documented_names() -> dict[str, Any]:
    """Run the program of the documentation that adds a quantizer to the table; return its names."""
    text = (Path(__file__).parents[2] / "docs" / "quantizers.md").read_text()
    (program,) = (code for code in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "QUANTIZERS" in code)
    names: dict[str, Any] = {}
    exec(program, names)
    return names


def documented() -> QuantizerKind:
    """Return the quantizer of the documentation, without its entry in the table."""
    documented_names()
    return QUANTIZERS.pop("log")


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Formula(QuantizerKind):
    """A trained scale in ops of torch."""

    label = "own"
    PLAIN = False

    def tensors(self, spec: qt.QuantSpec, shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        return {**super().tensors(spec, shape), "_growth": nn.Parameter(torch.ones(shape or (1,)))}

    def grid(self, quantizer: qt.TensorQuantizer) -> tuple[Tensor, Tensor | None]:
        return quantizer._scale * quantizer._growth.abs().reshape(quantizer._scale.shape), None

    def quantize(self, quantizer: qt.TensorQuantizer, x: Tensor) -> Tensor:
        spec, wide = quantizer.spec, x.float()
        step = per_element(self.grid(quantizer)[0], x, spec, quantizer.group)
        return (Rounded.apply(wide / step).clamp(spec.qmin, spec.qmax) * step).to(x.dtype)


OWN = {"log": documented(), "formula": Formula()}
