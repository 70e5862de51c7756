"""How fast an engine may be: its operations and bytes in each type, and the time of a GPU that does nothing else.

An engine computes each tensor in the type that the file gives it. Its kernels are layers with the ops that are fused into
them: batch norms, activations, residual adds, chains of elementwise ops, and quantizers; an attention is one kernel where
    it is fused. A
kernel takes as long as its products at the peak of their type, or as its tensors at the bandwidth, whichever is longer. Real
kernels reach neither, and each takes some microseconds to start: the estimate is a lower bound, and its use is to compare.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from qtoolkit.backends import Backend
from qtoolkit.lint.ops import Op, find_quantizers
from qtoolkit.op_kinds.reached import reached

TYPES = ("int8", "float16", "float32")
BYTES = dict(zip(TYPES, (1, 2, 4), strict=True))
FLOATS = {"FLOAT16": "float16", "BFLOAT16": "float16", "FLOAT": "float32", "DOUBLE": "float32"}
# Ops that give the memory of their input another shape.
VIEWS = ("Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity", "Dropout")


GpuName = Literal["H100", "A100", "L4", "T4", "Orin", "RTX4090"]


@dataclass(frozen=True)
class Gpu:
    """The peaks of a GPU.

    Attributes:
        name: Its name.
        int8: Operations in a second, in int8, dense. A product and its sum are two.
        float16: The same in float16.
        float32: The same in float32: TF32, in which TensorRT computes float32 where the GPU has it.
        bandwidth: Bytes of its memory in a second.
    """

    name: GpuName
    int8: float
    float16: float
    float32: float
    bandwidth: float


# Of NVIDIA's data sheets, without sparsity: H100 SXM, A100 SXM of 80 GB, L4, T4, Jetson AGX Orin of 64 GB (its GPU alone, whose
# float32 is not TF32, as the T4's) and the white paper of the RTX 4090.
GPUS: Mapping[GpuName, Gpu] = {
    gpu.name: gpu
    for gpu in (
        Gpu("H100", 1979e12, 989e12, 495e12, 3350e9),
        Gpu("A100", 624e12, 312e12, 156e12, 2039e9),
        Gpu("L4", 242e12, 121e12, 60e12, 300e9),
        Gpu("T4", 130e12, 65e12, 8.1e12, 320e9),
        Gpu("Orin", 85e12, 42.5e12, 5.3e12, 204.8e9),
        Gpu("RTX4090", 660.6e12, 330.3e12, 82.6e12, 1008e9),
    )
}


@dataclass
class Cost:
    """The operations and bytes of one type.

    Attributes:
        macs: Multiplications of matrix products and convolutions.
        bytes: Bytes of tensors that are read and written, weights too.
    """

    macs: int = 0
    bytes: int = 0

    def __str__(self) -> str:
        return f"{self.macs / 1e6:,.2f} million MACs, {self.bytes / 1e6:,.2f} MB read and written"


@dataclass
class Costs:
    """The operations and bytes of an engine."""

    of_types: dict[str, Cost] = field(default_factory=lambda: {name: Cost() for name in TYPES})
    seconds: float = 0.0
    unknown: int = 0  # ops whose sizes are not known, and which are left out


def float_type(op: Op) -> str:
    """Return the type of an op's floats: "float16" or "float32"; "" of ops on indices, and where it is not known."""
    return FLOATS.get(op.node.dtype, "")


def is_on_codes(op: Op, backend: Backend) -> bool:
    """Return whether an engine computes an op in integers; `find_quantizers` must have run."""
    if not op.inputs or op.is_quantizer or op.has_float_weight or any(source.quantizer is None for source in op.inputs):
        return False
    if op.kind.multiplies:
        return op.weight is None or op.weight.bits == 8
    gives_codes = op.quantizer is not None or (bool(op.users) and all(user.is_quantizer for user in op.users))
    return not op.returned and gives_codes and backend.role(op.kind) not in ("float", "activation")


def is_pointwise(op: Op) -> bool:
    """Return whether an op computes each value from one value of each input, so that it can be fused with such ops."""
    kind = op.kind
    return kind.activation or kind.elementwise or kind.with_constant or kind.normalizes_batches or kind.returns_input


def costs_of(ops: Sequence[Op], backend: Backend, gpu: Gpu, in_float16: bool = False) -> Costs:
    """Return the cost of an engine of a file; with `in_float16`, the cost of the same model without quantizers, in float16."""
    find_quantizers(ops, backend)
    return _Engine(ops, backend, in_float16).costs(gpu)


class _Engine:
    """The kernels of an engine."""

    def __init__(self, ops: Sequence[Op], backend: Backend, in_float16: bool) -> None:
        self.backend, self.in_float16 = backend, in_float16
        self.ops = [op for op in ops if not self._passes(op)]
        self.kernels: dict[Op, list[Op]] = {}
        for op in self.ops:
            self.kernels[op] = [op]
            sources = [source for source in self.sources(op) if self._takes_in(source, op)]
            if sources:
                self._join(max(sources, key=lambda source: source.place), op)
        for op in self.ops:
            if op.kind.normalizes_scores:
                for part in fused_attention(op, backend, self.in_float16):
                    if part in self.kernels:
                        self._join(op, part)

    def _passes(self, op: Op) -> bool:
        return (op.is_quantizer and self.in_float16 and bool(op.inputs)) or (
            op.node.op_type in VIEWS and bool(op.inputs)
        )

    def sources(self, op: Op) -> list[Op]:
        """Return the ops that compute an op's inputs, through views."""
        return [self._maker(source) for source in op.inputs]

    def _maker(self, op: Op) -> Op:
        while self._passes(op):
            op = op.inputs[0]
        return op

    def users(self, op: Op) -> list[Op]:
        """Return the ops that take an op's output, through views."""
        found = reached(op.users, lambda user: user.users if self._passes(user) else ())
        return [user for user in found if not self._passes(user)]

    def _is_returned(self, op: Op) -> bool:
        return any(each.returned for each in reached([op], lambda op: filter(self._passes, op.users)))

    def _takes_in(self, source: Op, op: Op) -> bool:
        """Return whether an op becomes a part of the kernel that computes its input."""
        if source.is_input or source.is_quantizer or not is_pointwise(op) or self._is_returned(source):
            return False
        users = [user for user in self.users(source) if not user.is_quantizer]
        return users == [op] or all(map(is_pointwise, users))

    def _join(self, one: Op, other: Op) -> None:
        if self.kernels[one] is not self.kernels[other]:
            self.kernels[one] += self.kernels[other]
            for op in self.kernels[other]:
                self.kernels[op] = self.kernels[one]

    def type_of(self, op: Op) -> str:
        """Return the type in which an op computes; "" of ops on indices."""
        if not self.in_float16 and is_on_codes(op, self.backend):
            return "int8"
        return self._float_type(op)

    def _float_type(self, op: Op) -> str:
        found = float_type(op)
        return "float16" if found and self.in_float16 and not op.is_input else found

    def costs(self, gpu: Gpu) -> Costs:
        """Return the costs of all kernels."""
        total = Costs()
        for kernel in {id(kernel): kernel for kernel in self.kernels.values()}.values():
            found = self._cost(kernel, total)
            peaks = (gpu.int8, gpu.float16, gpu.float32)
            products = sum(2 * found[name].macs / peak for name, peak in zip(TYPES, peaks, strict=True))
            total.seconds += max(products, sum(cost.bytes for cost in found.values()) / gpu.bandwidth)
            for name, cost in found.items():
                total.of_types[name].macs += cost.macs
                total.of_types[name].bytes += cost.bytes
        return total

    def _cost(self, kernel: Iterable[Op], total: Costs) -> dict[str, Cost]:
        """Return the cost of a kernel; quantizers after another op are a part of it, and inputs cost nothing."""
        found, parts, read = {name: Cost() for name in TYPES}, set(kernel), set[Op]()
        for op in parts:
            computed = self.type_of(op)
            if op.is_input or (op.is_quantizer and op.inputs and not self.sources(op)[0].is_input):
                continue
            if op.is_quantizer:
                self._move(found, "int8", op.node.values, total)
            elif computed:
                found[computed].macs += op.node.macs
                width = 1.0 if self.in_float16 or op.weight is None else op.weight.bits / 8
                stored = "int8" if op.weight is not None and not self.in_float16 else computed
                found[stored].bytes += int(op.node.weights * (width if stored == "int8" else BYTES[stored]))
                for written in self._written(op, parts):
                    self._move(found, written, op.node.values, total)
            else:
                continue
            for source, values in zip(self.sources(op), op.node.taken, strict=True):
                if source not in parts and source not in read:
                    read.add(source)
                    self._move(found, "int8" if self._gives_codes(source) else self._float_type(source), values, total)
        return found

    def _gives_codes(self, op: Op) -> bool:
        return not self.in_float16 and op.quantizer is not None

    def _written(self, op: Op, kernel: set[Op]) -> list[str]:
        """Return the types in which an op writes its output: integers for quantizers, each once, and floats for others."""
        users = [user for user in self.users(op) if user not in kernel]
        if self._gives_codes(op):
            return ["int8"] if users else []
        grids = {user.grid for user in users if user.is_quantizer}
        floats = self._is_returned(op) or any(not user.is_quantizer for user in users)
        return ["int8"] * len(grids) + [self._float_type(op)] * floats

    def _move(self, found: Mapping[str, Cost], name: str, values: int | None, total: Costs) -> None:
        if values is None:
            total.unknown += 1
        elif name:
            found[name].bytes += values * BYTES[name]


def fused_attention(softmax: Op, backend: Backend, in_float16: bool = False) -> tuple[Op, ...]:
    """Return the ops of the attention that a softmax is a part of, if an engine computes it as one; () otherwise."""
    found = attention_of(softmax)
    return found if found and (in_float16 or not why_not_fused(found, backend)) else ()


def attention_of(softmax: Op) -> tuple[Op, ...]:
    """Return a product of two activations, the ops up to a softmax, the softmax, and the ops up to the product after it.

    The first and the last op are the products; () where there are none.
    """
    before = [softmax]
    while not _is_product(before[0]):
        if not before[0].inputs or not (before[0] is softmax or _leads_on(before[0])):
            return ()
        before.insert(0, before[0].inputs[0])
    behind = [softmax]
    while not _is_product(behind[-1]):
        if len(behind[-1].users) != 1 or not (behind[-1] is softmax or _leads_on(behind[-1])):
            return ()
        behind.append(behind[-1].users[0])
    return (*before, *behind[1:])


def _is_product(op: Op) -> bool:
    return op.kind.of_two_matrices and op.layer is None


def _leads_on(op: Op) -> bool:
    return op.is_quantizer or is_pointwise(op) or op.node.op_type in VIEWS


def why_not_fused(attention: Sequence[Op], backend: Backend) -> str:
    """Return why an engine does not compute an attention as one; "" where it may."""
    first, last = attention[0], attention[-1]
    on_codes = [op for op in (first, last) if is_on_codes(op, backend)]
    if len(on_codes) == 1:
        (inside,), (outside,) = on_codes, {first, last}.difference(on_codes)
        return f"{inside.name!r} computes in integers, and {outside.name!r} in float"
    return "its products are float32" if not on_codes and "float32" in map(float_type, (first, last)) else ""
