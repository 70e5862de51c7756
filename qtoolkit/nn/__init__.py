"""QAT modules: a torch layer whose weight passes a quantizer; parameters keep their names and identity."""

from qtoolkit.nn.conv import QuantConv2d
from qtoolkit.nn.conv_transpose import QuantConvTranspose2d
from qtoolkit.nn.linear import QuantLinear
from qtoolkit.nn.weighted import QuantWeighted

# Float type -> QAT type: what the swap pass replaces.
QAT_MODULES: dict[type, type[QuantWeighted]] = {
    QuantConv2d.FLOAT: QuantConv2d,
    QuantConvTranspose2d.FLOAT: QuantConvTranspose2d,
    QuantLinear.FLOAT: QuantLinear,
}

__all__ = ["QAT_MODULES", "QuantConv2d", "QuantConvTranspose2d", "QuantLinear", "QuantWeighted"]
