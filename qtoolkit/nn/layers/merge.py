"""Ops of several tensors as modules, float and quantized, for models that are not traced."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from qtoolkit.config import QuantSpec
from qtoolkit.errors import check_known, with_article
from qtoolkit.nn.layers.inputs import QuantInput
from qtoolkit.nn.module import QuantModule, activation_quantizer, quantized
from qtoolkit.nn.on_codes import TrainsOnCodes
from qtoolkit.nn.product import product
from qtoolkit.quantizers.quantizer import Quantizer
from qtoolkit.running import running

OPERANDS = ("both", "first", "second")


class Merge(nn.Module):
    """An op of two tensors as a module, which module replacement can quantize. Tracing records the op itself.

    Args:
        quantized: Which operands module replacement quantizes: "both", "first" or "second". TensorRT fuses the sum of a
            residual block into the preceding convolution only if the other branch alone is quantized.

    Raises:
        ValueError: `quantized` is another value.

    Example:
        >>> Add()(torch.tensor(1.0), torch.tensor(2.0)), MatMul()(torch.ones(2, 3), torch.ones(3))
        (tensor(3.), tensor([3., 3.]))
    """

    def __init__(self, quantized: str = "both") -> None:
        super().__init__()
        check_known("value of `quantized`", quantized, OPERANDS)
        self.quantized = quantized

    def extra_repr(self) -> str:
        return f"quantized={self.quantized!r}"


class Add(Merge):
    """The sum of two tensors."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        return input + other


class Mul(Merge):
    """The product of two tensors, element by element."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        return input * other


class MatMul(Merge):
    """The matrix product of two tensors, as torch.matmul defines it."""

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        return torch.matmul(input, other)


class Cat(nn.Module):
    """The concatenation of tensors.

    Args:
        dim: Dimension along which they are joined.

    Example:
        >>> Cat(dim=1)([torch.ones(2, 3), torch.ones(2, 1)]).shape
        torch.Size([2, 4])
    """

    def __init__(self, dim: int = 0) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(tensors), self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


class QuantMerge(QuantModule):
    """An op of two tensors with a quantizer for each operand that `quantized` names; to be mixed into the float module.

    Args:
        quantized: Which operands are quantized.
        input_spec: Spec of the operands, or None.

    Attributes:
        input_quantizer: Quantizer of the first operand, or None. With quantized="second" there is no such attribute.
        other_quantizer: Quantizer of the second, or None.

    Example:
        >>> layer = qt.nn.QuantMul(input_spec=qt.QuantSpec(bits=4))
        >>> layer.input_quantizer.amax, layer.other_quantizer.amax = 7.0, 7.0
        >>> layer(torch.tensor(1.4), torch.tensor(3.1))
        tensor(3.)
    """

    quantized: str
    other_quantizer: Quantizer | None

    def __init__(self, quantized: str = "both", input_spec: QuantSpec | None = None) -> None:
        super().__init__(quantized)
        name = type(self).__name__
        self.add_quantizers(None, name, input_spec)
        if quantized != "second":
            self.input_quantizer = activation_quantizer(input_spec, f"{name}.input_quantizer", self)

    def add_quantizers(self, weight: QuantSpec | None, name: str, activation: QuantSpec | None = None) -> None:
        if self.quantized != "second":
            self.input_quantizer = None
        spec = None if self.quantized == "first" else activation
        self.other_quantizer = activation_quantizer(spec, f"{name}.other_quantizer", self)

    def own_attributes(self) -> tuple[str, ...]:
        return ("input_quantizer", "other_quantizer")

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Apply the op to the quantized operands; TypeError for an operand that is not a tensor."""
        for name, operand in (("input", input), ("other", other)):
            if not isinstance(operand, Tensor):
                raise TypeError(
                    f"{type(self).__name__}: {name} must be a tensor, which has a range to quantize, got "
                    f"{with_article(type(operand))}; compute with numbers outside the module."
                )
        first: Quantizer | None = getattr(self, "input_quantizer", None)
        return self.compute(quantized(first, input), quantized(self.other_quantizer, other))

    def compute(self, input: Tensor, other: Tensor) -> Tensor:
        """Compute the op on quantized operands."""
        return self.forward_fp32(input, other)  # type: ignore[no-any-return]  # a Tensor


class QuantAdd(QuantMerge, Add):
    """The sum of two quantized tensors."""

    FLOAT, KIND = Add, "add"


class QuantMul(QuantMerge, Mul):
    """The product of two quantized tensors, element by element."""

    FLOAT, KIND = Mul, "mul"


class QuantMatMul(QuantMerge, MatMul, TrainsOnCodes):
    """The matrix product of two quantized tensors. In training it keeps integers for backward (see `qtoolkit.prepare`)."""

    FLOAT, KIND = MatMul, "matmul"

    def own_attributes(self) -> tuple[str, ...]:
        return (*super().own_attributes(), "training_arithmetic")

    @property
    def sources(self) -> tuple[Quantizer | None, Quantizer | None]:
        """The quantizers of both operands."""
        return getattr(self, "input_quantizer", None), self.other_quantizer

    def compute(self, input: Tensor, other: Tensor) -> Tensor:
        return product(running(), torch.matmul, input, other, self.sources, self.training_arithmetic)


class QuantCat(QuantInput, Cat):
    """The concatenation of tensors that share one quantizer, so that it only copies integers.

    Example:
        >>> layer = QuantCat(input_spec=qt.QuantSpec(bits=4))
        >>> layer.input_quantizer.amax = 7.0
        >>> layer([torch.tensor([1.4]), torch.tensor([50.0])])
        tensor([1., 7.])
    """

    FLOAT, KIND = Cat, "cat"

    def forward(self, tensors: Sequence[Tensor]) -> Tensor:  # type: ignore[override]  # several inputs, as Cat takes them
        return self.forward_fp32([quantized(self.input_quantizer, x) for x in tensors])  # type: ignore[no-any-return]
