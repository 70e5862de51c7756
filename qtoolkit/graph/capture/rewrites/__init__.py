"""Rewrites of a graph after its trace, one per file: the tracer records, and these change the recorded graph."""
