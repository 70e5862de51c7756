"""Graphs of models: capture traces a model, placement decides on quantizers, and passes change the graph."""

from qtoolkit.graph.block_calls import BlockCall, Foreign, Value
from qtoolkit.graph.blocks import ClassReference, TracedBlock, restore_block
from qtoolkit.graph.capture.tracer import ModelTracer
from qtoolkit.graph.graph_module import (
    Method,
    QuantizedGraphModule,
    QuantizedSequential,
    restore_graph_module,
    update_ranges,
)
from qtoolkit.graph.nodes import QuantizerHolder
from qtoolkit.graph.plan import Edge, Plan, Tracing
from qtoolkit.op_kinds.facts import NodeFacts
from qtoolkit.op_kinds.recorded import (
    TrainingMode,
    by_mode,
    call_scripted,
    check_default,
    check_given,
    check_none,
    check_size,
    items_of,
    length_of,
    set_item,
)
from qtoolkit.public import publish
from qtoolkit.verdicts import Cause, Status, Verdict

__all__ = [
    "BlockCall", "Cause", "ClassReference", "Edge", "Foreign", "Method", "ModelTracer", "NodeFacts", "Plan",
    "QuantizedGraphModule", "QuantizedSequential", "QuantizerHolder", "Status", "TracedBlock",
    "Tracing", "TrainingMode", "Value", "Verdict", "by_mode",
    "call_scripted", "check_default", "check_given", "check_none", "check_size", "items_of",
    "length_of", "restore_block", "restore_graph_module", "set_item",
]  # fmt: skip
publish(__name__, Cause, Edge, Method, ModelTracer, NodeFacts, Plan, QuantizedGraphModule, Status, Tracing, Verdict)
publish(__name__, QuantizedSequential, QuantizerHolder, restore_graph_module, update_ranges)
publish(__name__, BlockCall, Foreign, Value)
publish(__name__, ClassReference, TracedBlock, restore_block)
