"""Kinds of ops: one table, and what kind a graph node is."""
