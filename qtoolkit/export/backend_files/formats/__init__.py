"""The files that vendors' compilers take the grids of tensors from: one format a file, with its writer and its reader."""
