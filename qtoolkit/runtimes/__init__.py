"""Runtimes: one record of each (`qtoolkit.runtimes.table`), and how each executes a file."""
