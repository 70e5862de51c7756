"""What a GPU would do for a computation, counted without one: the kernels that it launches, and the bytes that they move.

Kernels of qtoolkit run on the host, where the first access to each page of a tensor is counted (table.cpp): a launch moves
each byte of a tensor once, however often it reads it. An op of torch takes the kernels that torch's own sources have for
CUDA, and moves its arguments and its results: the least that it can.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.ops.cuda_host import compiled

# The kernels of torch's ops on CUDA, but for those that take one: the least that convolutions take.
KERNELS = {
    "constant_pad_nd": 2,
    "convolution_backward": 2,
    "native_layer_norm_backward": 2,
    "_native_batch_norm_legit": 2,  # statistics, and values
    "native_batch_norm_backward": 2,  # sums, and gradients
    "_scaled_dot_product_flash_attention_for_cpu_backward": 2,  # products of gradients and outputs, then the gradients
}
# Arguments that a second kernel of the op reads again.
READ_AGAIN = {"_native_batch_norm_legit": (0,), "native_batch_norm_backward": (0, 1), "convolution_backward": (0,)}
NO_KERNELS = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "resize_", "_unsafe_view")
OVERWRITES = ("copy_", "fill_", "zero_")  # they do not read what they write


@dataclass
class Done:
    """What one call of an op does: its name, without those of the ops that it calls."""

    op: str
    launches: int = 0
    bytes: int = 0


class Work(TorchDispatchMode):
    """Counts what each call of an op of qtoolkit or of torch does; what qtoolkit's ops call is theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[Done] = []
        self.inside = False  # of an op of qtoolkit

    def __enter__(self) -> "Work":
        if not self.inside:
            compiled().launches()
            compiled().count_bytes(True)
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        if not self.inside:
            compiled().count_bytes(False)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = op.overloadpacket.__name__
        if op.namespace == "qtoolkit" and not self.inside:
            return self._of_qtoolkit(name, op, args, kwargs)
        if op._can_decompose():  # an op of others, which come here below autograd
            with self:
                return op.decompose(*args, **kwargs)
        result = op(*args, **kwargs)
        if op.namespace == "aten" and not is_view(op) and name not in NO_KERNELS:
            if not self.inside:
                self.done.append(Done(name))
            self.done[-1].launches += KERNELS.get(name, 1)
            self.done[-1].bytes += bytes_of(name, args, kwargs, result)
        return result

    def _of_qtoolkit(self, name: str, op: Any, args: Any, kwargs: Any) -> Any:
        """Call the body of an op, so that the ops which it calls come here too."""
        self.done.append(Done(name))
        self.inside = True
        with self:
            result = op._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        self.inside = False
        self.done[-1].launches += compiled().launches()
        self.done[-1].bytes += compiled().count_bytes(True)
        return result


def is_view(op: Any) -> bool:
    """Return whether an op returns the memory of an argument, or only reads what the host knows."""
    returns = op._schema.returns
    return all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def bytes_of(name: str, args: Any, kwargs: Any, result: Any) -> int:
    """Return the bytes of the tensors that an op of torch reads and writes."""
    read = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    if name in OVERWRITES:
        read = read[1:]
    again = [args[i] for i in READ_AGAIN.get(name, ())]
    written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
    return sum(t.numel() * t.element_size() for t in (*read, *again, *written))
