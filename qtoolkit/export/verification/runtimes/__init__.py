"""How runtimes execute a file (`qtoolkit.runtimes.table.Runtime.execute`)."""
