"""What is done to a graph after its trace, one rewrite a file: the tracer records, and these change what it recorded."""
