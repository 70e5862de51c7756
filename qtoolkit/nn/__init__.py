"""QAT modules: torch modules with quantizers inside; parameters keep their names and identity."""

from qtoolkit.nn.attention import QuantMultiheadAttention, stop_fast_path
from qtoolkit.nn.batch_norm import (
    LinkedBatchNorm,
    QuantBatchNorm1d,
    QuantBatchNorm2d,
    QuantBatchNorm3d,
    QuantFrozenBatchNorm,
    QuantSyncBatchNorm,
    freeze_batch_norm,
    unfreeze_batch_norm,
)
from qtoolkit.nn.dot_product_attention import QuantScaledDotProductAttention, ScaledDotProductAttention
from qtoolkit.nn.layer_call import LayerCall, Source  # noqa: F401 (pickles of layers name them)
from qtoolkit.nn.layers.cells import QuantGRUCell, QuantLSTMCell, QuantRecurrent
from qtoolkit.nn.layers.conv import QuantConv1d, QuantConv2d, QuantConv3d
from qtoolkit.nn.layers.conv_transpose import QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d
from qtoolkit.nn.layers.embedding import QuantEmbedding, QuantEmbeddingBag
from qtoolkit.nn.layers.inputs import (
    QuantAdaptiveAvgPool1d,
    QuantAdaptiveAvgPool2d,
    QuantAdaptiveAvgPool3d,
    QuantAvgPool1d,
    QuantAvgPool2d,
    QuantAvgPool3d,
    QuantInput,
    QuantInstanceNorm1d,
    QuantInstanceNorm2d,
    QuantInstanceNorm3d,
    QuantMaxPool1d,
    QuantMaxPool2d,
    QuantMaxPool3d,
)
from qtoolkit.nn.layers.linear import QuantLinear
from qtoolkit.nn.layers.merge import (
    Add,
    Cat,
    MatMul,
    Mul,
    QuantAdd,
    QuantCat,
    QuantMatMul,
    QuantMul,
)
from qtoolkit.nn.layers.recurrent import QuantGRU, QuantLSTM
from qtoolkit.nn.module import QuantModule, quantize_output, reset_after_loading
from qtoolkit.nn.on_codes import TrainingArithmetic, set_training_arithmetic
from qtoolkit.nn.product import Product  # noqa: F401 (pickles of graphs name it)
from qtoolkit.nn.registry import imported_types
from qtoolkit.nn.weighted import QuantWeighted
from qtoolkit.public import publish
from qtoolkit.unregistered import Unregistered  # noqa: F401 (pickles of layers name it)

# Float type -> QAT type: the layers that the swap pass replaces.
QAT_MODULES: dict[type, type[QuantModule]] = {
    qat_type.FLOAT: qat_type
    for qat_type in (
        QuantConv1d, QuantConv2d, QuantConv3d, QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d, QuantLinear,
        QuantEmbedding, QuantEmbeddingBag, QuantMultiheadAttention, QuantLSTM, QuantGRU, QuantLSTMCell, QuantGRUCell,
    )
}  # fmt: skip
# Float type -> QAT type: the layers that module replacement, which sees no graph, gives input quantizers of their own.
REPLACED_MODULES: dict[type, type[QuantModule]] = QAT_MODULES | {
    qat_type.FLOAT: qat_type
    for qat_type in (
        QuantMaxPool1d, QuantMaxPool2d, QuantMaxPool3d, QuantAvgPool1d, QuantAvgPool2d, QuantAvgPool3d, QuantAdaptiveAvgPool1d,
        QuantAdaptiveAvgPool2d, QuantAdaptiveAvgPool3d,
        QuantInstanceNorm1d, QuantInstanceNorm2d, QuantInstanceNorm3d, QuantAdd, QuantMul, QuantMatMul, QuantCat,
        QuantScaledDotProductAttention,
    )
}  # fmt: skip


def replaced_modules() -> dict[type, type[QuantModule]]:
    """Return REPLACED_MODULES, with the layers of packages that have been imported, such as transformers' Conv1D.

    Example:
        >>> replaced_modules()[torch.nn.Linear].__name__
        'QuantLinear'
    """
    return REPLACED_MODULES | imported_types()


__all__ = [
    "QAT_MODULES",
    "REPLACED_MODULES",
    "Add",
    "Cat",
    "LinkedBatchNorm",
    "MatMul",
    "Mul",
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAdd",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
    "QuantBatchNorm1d",
    "QuantBatchNorm2d",
    "QuantBatchNorm3d",
    "QuantCat",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantEmbeddingBag",
    "QuantFrozenBatchNorm",
    "QuantGRU",
    "QuantGRUCell",
    "QuantInput",
    "QuantInstanceNorm1d",
    "QuantInstanceNorm2d",
    "QuantInstanceNorm3d",
    "QuantLSTM",
    "QuantLSTMCell",
    "QuantLinear",
    "QuantMatMul",
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
    "QuantModule",
    "QuantMul",
    "QuantMultiheadAttention",
    "QuantRecurrent",
    "QuantScaledDotProductAttention",
    "QuantSyncBatchNorm",
    "QuantWeighted",
    "ScaledDotProductAttention",
    "TrainingArithmetic",
    "freeze_batch_norm",
    "replaced_modules",
    "set_training_arithmetic",
    "unfreeze_batch_norm",
]
publish(
    __name__,
    *(value for value in list(globals().values()) if isinstance(value, type)),
    quantize_output,  # hooks on modules
    reset_after_loading,
    stop_fast_path,
)
