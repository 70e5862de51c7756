"""Graph passes: trace, fuse, swap, insert, fold. One pass a file, each a function on a GraphModule."""
