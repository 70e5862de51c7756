"""LiteRT files: lowering of a torch.export program to a flatbuffer."""
