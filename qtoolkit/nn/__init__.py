"""QAT modules: torch modules with quantizers inside; parameters keep their names and identity."""

from qtoolkit.nn.attention import QuantMultiheadAttention
from qtoolkit.nn.batch_norm import LinkedBatchNorm, freeze_batch_norm, unfreeze_batch_norm
from qtoolkit.nn.conv import QuantConv1d, QuantConv2d, QuantConv3d
from qtoolkit.nn.conv_transpose import QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d
from qtoolkit.nn.embedding import QuantEmbedding, QuantEmbeddingBag
from qtoolkit.nn.linear import QuantLinear
from qtoolkit.nn.module import QuantModule
from qtoolkit.nn.weighted import QuantWeighted

# Float type -> QAT type: what the swap pass replaces.
QAT_MODULES: dict[type, type[QuantModule]] = {
    QuantConv1d.FLOAT: QuantConv1d,
    QuantConv2d.FLOAT: QuantConv2d,
    QuantConv3d.FLOAT: QuantConv3d,
    QuantConvTranspose1d.FLOAT: QuantConvTranspose1d,
    QuantConvTranspose2d.FLOAT: QuantConvTranspose2d,
    QuantConvTranspose3d.FLOAT: QuantConvTranspose3d,
    QuantLinear.FLOAT: QuantLinear,
    QuantEmbedding.FLOAT: QuantEmbedding,
    QuantEmbeddingBag.FLOAT: QuantEmbeddingBag,
    QuantMultiheadAttention.FLOAT: QuantMultiheadAttention,
}
# Float type -> QAT type: what replacement without a graph puts in. It sees no edges, so layers bring their input quantizers.
REPLACED_MODULES: dict[type, type[QuantModule]] = dict(QAT_MODULES)

__all__ = [
    "QAT_MODULES",
    "REPLACED_MODULES",
    "LinkedBatchNorm",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantEmbeddingBag",
    "QuantLinear",
    "QuantModule",
    "QuantMultiheadAttention",
    "QuantWeighted",
    "freeze_batch_norm",
    "unfreeze_batch_norm",
]
