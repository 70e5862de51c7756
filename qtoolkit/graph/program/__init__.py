"""The program of a prepared model: Python that is written from its graph, which has a node for each op and stays as it is."""

from qtoolkit.graph.program.forward import calls_now, compile_forward, runs_its_graph

__all__ = ["calls_now", "compile_forward", "runs_its_graph"]
