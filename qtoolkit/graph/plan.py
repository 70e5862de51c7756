"""The decisions of prepare, as data: the status of each op with its cause, and every quantized edge with its rule."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from qtoolkit.backends import Backend
from qtoolkit.config import QConfigMapping, QuantSpec
from qtoolkit.graph.output_types import OutputTypes
from qtoolkit.verdicts import Cause, Refusal, Verdict


@dataclass(frozen=True)
class Computed:
    """How a runtime computes an op between quantizers."""

    kernel: str | None  # the name of its integer kernel; None for float
    why: str = ""  # why it is float
    last: str = ""  # the node of the last op that the kernel computes: the op itself, or an activation after it
    cause: Cause | None = None  # the cause of that; None with a kernel

    @classmethod
    def in_float(cls, refusal: Refusal) -> "Computed":
        """Return the record of an op in float."""
        return cls(None, refusal.text, cause=refusal.cause)

    def __str__(self) -> str:
        return self.kernel or f"float: {self.why}"


@dataclass(frozen=True)
class Edge:
    """A quantized tensor on its way into an op.

    Attributes:
        source: The graph node that makes the tensor; or the name of a layer's weight, or of a tensor inside a layer or a leaf
            module: `attn.softmax`, `block.conv.input`.
        consumer: The graph node that takes it, directly or through ops that only move values; or the dotted name of a layer
            inside a leaf module.
        quantizer: Name of the quantizer. Edges with one quantizer share its scale.
        spec: How it quantizes.
        why: The rule that asks for it, in words.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(1)), backend="tensorrt")
        >>> [edge.quantizer for edge in prepared.plan.edges]
        ['activation_quantizers.input_1', '0.weight_quantizer']
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
        leaf_modules: Types of leaf modules.
        skip: Dotted names of leaf modules, the `untraced` of prepare.
        concrete_args: Values of arguments of forward that were fixed.
        measured: Whether example inputs decided on sizes.
        branches: Submodules whose Python branches on their mode, and of which the graph has the branch of `training` alone.
        training: Whether the model was in training mode.
        output_types: The classes of mappings that forward returns, such as ModelOutput of transformers, by the keys that lead
            to them, inner ones first.
        values: The numbers, strings, flags and None among the attributes of the model itself.

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(1)), backend="tensorrt")
        >>> prepared.plan.tracing.training
        True
    """

    leaf_modules: tuple[type[nn.Module], ...] = ()
    skip: tuple[str, ...] = ()
    concrete_args: Mapping[str, object] | None = None
    measured: bool = False
    branches: tuple[str, ...] = ()
    training: bool = False
    output_types: OutputTypes = ()
    values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """The decisions of prepare.

    Attributes:
        backend: The target.
        status: The verdict on each node, by its name.
        kinds: The kind of op of each node, by its name, or of each layer of a model without a graph, by its dotted name. A
            node of another kind was changed afterwards.
        edges: Every quantized edge: weights, and tensors inside layers and leaf modules, included.
        inside: The verdict on each layer inside a leaf module, or of a model without a graph, by its dotted name.
        tracing: How the model was traced.
        mapping: The configs that the user gave.
        computed: How the runtime computes each op that takes quantized tensors, by its node's name, if the model was converted
            with arithmetic="integer".

    Example:
        >>> prepared = qt.prepare(torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.Softmax(1)), backend="tensorrt")
        >>> prepared.plan.backend.name, {name: str(verdict.status) for name, verdict in prepared.plan.status.items()}
        ('tensorrt', {'input_1': 'float', '_0': 'quantized', '_1': 'float', 'output': 'float'})
    """

    backend: Backend
    status: Mapping[str, Verdict] = field(default_factory=dict)
    kinds: Mapping[str, str] = field(default_factory=dict)
    edges: tuple[Edge, ...] = ()
    inside: Mapping[str, Verdict] = field(default_factory=dict)
    tracing: Tracing = Tracing()
    mapping: QConfigMapping | None = None
    computed: Mapping[str, Computed] = field(default_factory=dict)
