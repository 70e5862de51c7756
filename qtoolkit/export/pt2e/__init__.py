"""The PT2E form of a program of torch.export."""
