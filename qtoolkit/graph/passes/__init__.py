"""Graph passes: each takes a graph module and returns it, changed. One pass a file."""
