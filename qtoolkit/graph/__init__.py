"""Graphs of models: capture traces a model, placement decides on quantizers, and passes change the graph."""

from qtoolkit.graph.capture.tracer import ModelTracer
from qtoolkit.graph.graph_module import Method, QuantizedGraphModule, restore_graph_module, update_ranges
from qtoolkit.graph.plan import Cause, Edge, Plan, Status, Tracing, Verdict
from qtoolkit.op_kinds.facts import NodeFacts
from qtoolkit.op_kinds.recorded import (
    TrainingMode,
    call_scripted,
    check_none,
    check_size,
    items_of,
    length_of,
    set_item,
)
from qtoolkit.public import publish

__all__ = [
    "Cause",
    "Edge",
    "Method",
    "ModelTracer",
    "NodeFacts",
    "Plan",
    "QuantizedGraphModule",
    "Status",
    "Tracing",
    "TrainingMode",
    "Verdict",
    "call_scripted",
    "check_none",
    "check_size",
    "items_of",
    "length_of",
    "restore_graph_module",
    "set_item",
]
publish(__name__, Cause, Edge, Method, ModelTracer, NodeFacts, Plan, QuantizedGraphModule, Status, Tracing, Verdict)
publish(__name__, restore_graph_module, update_ranges)
