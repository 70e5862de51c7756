"""Functions with a weight, such as F.conv2d(x, weight), computed by the kernels of layers."""

from collections.abc import Callable

from torch import Tensor, nn

from qtoolkit.integer.kernels import LayerKernel, OpKernel


class FunctionKernel(OpKernel):
    """Computes a function with the kernel of the equivalent layer, and its own copies of weight and bias."""

    def __init__(self, op: Callable[..., Tensor], kernel: LayerKernel, kind: str, replaces: str) -> None:
        super().__init__(op, [], None, kind, replaces)
        self.kernel = kernel
        self._changed = False

    @property
    def active(self) -> bool:
        """Whether the function computes in integers."""
        return self.kernel.active

    def refresh(self) -> None:
        """Copy the current weight and bias from the next call."""
        self._changed = True

    def compute(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: object, **kwargs: object
    ) -> Tensor:
        """Return the output; weight and bias are used only after a state dict was loaded."""
        if self._changed:
            layer = self.kernel.layer
            layer.weight = nn.Parameter(weight.detach(), False)
            layer.bias = None if bias is None else nn.Parameter(bias.detach(), False)
            self.kernel.refresh()
            self._changed = False
        return self.kernel(input)  # type: ignore[no-any-return]  # a Tensor
