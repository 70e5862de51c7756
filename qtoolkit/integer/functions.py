"""Functions with a weight, F.conv2d(x, weight), computed by the kernels of layers."""

from collections.abc import Callable

from torch import Tensor, nn

from qtoolkit.integer.kernels import LayerKernel, OpKernel


class FunctionKernel(OpKernel):
    """Computes a function by the kernel of the layer that computes the same, with its own copies of weight and bias."""

    def __init__(self, op: Callable[..., Tensor], kernel: LayerKernel, kind: str, replaces: str) -> None:
        super().__init__(op, [], None, kind, replaces)
        self.kernel = kernel
        self._changed = False

    @property
    def active(self) -> bool:
        """Whether the function computes on codes."""
        return self.kernel.active

    def refresh(self) -> None:
        """Take the weight and the bias from the next call, which has them as the model is now."""
        self._changed = True

    def compute(
        self, input: Tensor, weight: Tensor, bias: Tensor | None = None, *args: object, **kwargs: object
    ) -> Tensor:
        """Return the output; the weight and the bias count where a state dict was loaded."""
        if self._changed:
            layer = self.kernel.layer
            layer.weight = nn.Parameter(weight.detach(), False)
            layer.bias = None if bias is None else nn.Parameter(bias.detach(), False)
            self.kernel.refresh()
            self._changed = False
        return self.kernel(input)  # type: ignore[no-any-return]  # a Tensor
