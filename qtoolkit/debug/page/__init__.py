"""The content of the page of `qtoolkit.debug.report`, and its template."""
