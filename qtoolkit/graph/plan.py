"""What prepare decided, as data: of each op its status, and every quantized edge with the reason."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from qtoolkit.backends import Backend
from qtoolkit.config import QuantSpec

Status = Literal["quantized", "fused", "transparent", "float"]


@dataclass(frozen=True)
class Edge:
    """A quantized tensor on its way into an op.

    Attributes:
        source: The graph node that makes the tensor, or the name of a layer's weight, or of a tensor inside a layer or a
            submodule that is kept whole: `attn.softmax`, `block.conv.input`.
        consumer: The graph node that takes it, directly or through ops that only move values, or the dotted name of a layer
            inside a submodule that is kept whole.
        quantizer: Name of the quantizer; edges with the same one share its scale.
        spec: How it quantizes.
        why: The rule that asks for it, in words.
    """

    source: str
    consumer: str
    quantizer: str
    spec: QuantSpec
    why: str

    def __str__(self) -> str:
        return f"{self.source} -> {self.consumer}: {self.spec.describe()} by {self.quantizer}: {self.why}"


@dataclass(frozen=True)
class Tracing:
    """The options of `qtoolkit.graph.capture.trace.run` that the model was traced with.

    Attributes:
        leaf_modules: Types of submodules that were kept whole.
        skip: Dotted names of submodules that were kept whole.
        concrete_args: Values of arguments of forward that were fixed.
        measured: Whether example inputs decided on sizes.
    """

    leaf_modules: tuple[type[nn.Module], ...] = ()
    skip: tuple[str, ...] = ()
    concrete_args: Mapping[str, Any] | None = None
    measured: bool = False


@dataclass(frozen=True)
class Plan:
    """What prepare decided.

    Attributes:
        backend: The target.
        status: Of each node, by name: its status and, where there is something to say, the reason.
        edges: Every quantized edge: weights, and tensors inside layers and submodules that are kept whole, included.
        inside: The status of each layer inside submodules that were kept whole, by dotted name.
        tracing: How the model was traced.
    """

    backend: Backend
    status: Mapping[str, tuple[Status, str]] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    inside: Mapping[str, tuple[Status, str]] = field(default_factory=dict)
    tracing: Tracing = Tracing()
