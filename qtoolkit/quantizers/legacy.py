"""The base class of quantizers that follow another tool's conventions instead of qtoolkit's."""

from torch import nn


class LegacyQuantizer(nn.Module):
    """A quantizer of `qtoolkit.compat`, which calibrates and exports as the tool that it stands for."""
