"""ExecuTorch on the CPU with the XNNPACK delegate: lower a program to a file, and run the file.

The delegate does not return intermediate quantized values. They are read from a second file that has them as outputs.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version

import torch
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

from qtoolkit.backends import backends
from qtoolkit.errors import first_line
from qtoolkit.export.pt2e import layer_name
from qtoolkit.model_inputs import tensors_of, with_tensors
from qtoolkit.op_kinds.table import KINDS, OF_ATEN
from qtoolkit.runtimes.execution import Array, ExecutedLayer

# Activations that the delegate fuses into the op before them.
JOINED = {name for kind in backends["xnnpack"].joined_activations for name in KINDS[kind].aten}


@dataclass(frozen=True)
class Lowered:
    """A program lowered for ExecuTorch."""

    file: bytes  # the content of the file
    # the ops that compute, in the delegate or in kernels of ExecuTorch, which are "portable"
    layers: tuple[ExecutedLayer, ...]
    conversions: int  # how many ops convert between floats and codes
    delegates: int  # how many parts of the program the delegate computes


def lower(program: ExportedProgram) -> Lowered:
    """Lower a program, and delegate all supported ops. Raises RuntimeError: ExecuTorch cannot lower it."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from executorch.exir import to_edge_transform_and_lower
    from executorch.exir.lowered_backend_module import get_lowered_backend_modules

    try:
        edge = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
        whole = edge.exported_program().graph_module
        parts = [part.original_module.graph_module for part in get_lowered_backend_modules(whole)]
        delegated = [found for part in parts for found in _ops(part.graph.nodes)]
        portable = [LoweredOp(op.node, op.kind, False) for op in _ops(whole.graph.nodes)]
        file = bytes(edge.to_executorch().buffer)
    except Exception as error:  # its errors have no base class of their own
        raise RuntimeError(
            f"export_executorch: ExecuTorch cannot lower the program: {type(error).__name__}: {first_line(error)}."
        ) from error
    computing = (op for op in delegated if op.computes and not _only_moves(op))
    layers = [ExecutedLayer(layer_name(op.node), f"XNNPACK {op.kind}", op.integer) for op in computing]
    layers += [
        ExecutedLayer(layer_name(op.node), f"portable {op.kind}", False, left=True) for op in portable if op.computes
    ]
    conversions = [op for op in (*delegated, *portable) if op.converts]
    return Lowered(file, tuple(layers), len(conversions), len(parts))


def load(file: bytes) -> Callable[[Sequence[Tensor]], list[Array]]:
    """Return a function that runs a file's bytes on tensors, and returns its outputs as arrays.

    Raises RuntimeError: ExecuTorch does not find forward in the file.
    """
    from executorch.runtime import Runtime

    program = Runtime.get().load_program(file)
    method = program.load_method("forward")
    if method is None:
        raise RuntimeError("export_executorch: ExecuTorch does not find forward in the file that it wrote.")

    # A method object does not keep its program alive.
    def execute(tensors: Sequence[Tensor], owner: object = program) -> list[Array]:
        return [output.numpy().copy() for output in method.execute([x.detach().contiguous() for x in tensors])]

    return execute


def with_codes(program: ExportedProgram, inputs: object) -> ExportedProgram:
    """Return a program of the input tensors that also returns the quantized values, after its outputs."""
    return torch.export.export(_Reading(program.module(), inputs), tuple(tensors_of(inputs)))


def description() -> str:
    """Return the runtime and its version."""
    return f"executorch {version('executorch')} (XNNPACK)"


@dataclass(frozen=True)
class LoweredOp:
    """An op of a lowered graph."""

    node: fx.Node
    kind: str
    integer: bool
    converts: bool = False

    @property
    def computes(self) -> bool:
        """Whether it computes: False for getitem, for conversions, and for ops fused into the op before."""
        source = self.node.all_input_nodes[0] if self.node.all_input_nodes else None
        joins = self.kind in JOINED and source is not None and _kind(source) not in ("", "dequantize_per_tensor")
        return not (joins or "quantize_per" in self.kind)


def _only_moves(op: LoweredOp) -> bool:
    """Return whether an op of the delegate moves data: its names differ from aten, such as view_copy for view."""
    kinds = OF_ATEN.get(op.kind.removesuffix("_copy"), ())
    return any((kind.moves and not kind.takes_maxima) or kind.concatenates for kind in kinds)


def _ops(nodes: Iterable[fx.Node]) -> Iterator[LoweredOp]:
    from executorch.backends.xnnpack.utils.quant_utils import is_tagged_as_implicit_q_dq

    for node in nodes:
        kind = _kind(node)
        if kind in ("", "getitem", "executorch_call_delegate") or not isinstance(
            node.meta["val"], Tensor | tuple | list
        ):
            continue  # sizes among them
        implicit = [
            is_tagged_as_implicit_q_dq(source) for source in node.all_input_nodes if "dequantize" in _kind(source)
        ]
        converts = "quantize_per_tensor" in kind and not is_tagged_as_implicit_q_dq(node)
        yield LoweredOp(node, kind, any(implicit), converts)


def _kind(node: fx.Node) -> str:
    """Return the name of a node's op without its overload; "" for nodes that are not ops."""
    if node.op != "call_function":
        return ""
    name: str = getattr(node.target, "__name__", str(node.target))
    return name.removeprefix("aten.").removeprefix("quantized_decomposed.").partition(".")[0]


class _Reading(nn.Module):
    """Also returns the quantized values of a program."""

    def __init__(self, module: nn.Module, inputs: object) -> None:
        super().__init__()
        self.module, self.inputs = module, inputs

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        args, kwargs = with_tensors(self.inputs, iter(tensors))
        reader = _CodeReader(self.module)
        outputs = reader.run(*args, *kwargs.values())  # the graph takes the values that the containers hold, in order
        return (*tensors_of(outputs), *reader.codes)


class _CodeReader(fx.Interpreter):
    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.codes: list[Tensor] = []

    def run_node(self, n: fx.Node) -> object:
        result = super().run_node(n)
        if _kind(n).startswith("quantize_per"):
            self.codes.append(result)
        return result
