"""Execution of files in runtimes (`qtoolkit.runtimes.table.Runtime.execute`)."""
