"""LiteRT's files: the flatbuffer, and how a program of torch.export becomes one."""
