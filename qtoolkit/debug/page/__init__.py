"""What the page of `qtoolkit.debug.report` shows, and its template."""
