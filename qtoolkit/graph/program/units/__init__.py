"""Units of a prepared model in training: modules that one op computes while they are as they were when that was decided."""

from qtoolkit.graph.program.units.attention import AttentionUnit
from qtoolkit.graph.program.units.base import snapshot_of
from qtoolkit.graph.program.units.batch_norm import BatchNormUnit
from qtoolkit.graph.program.units.function import FunctionUnit
from qtoolkit.graph.program.units.layer import LayerUnit

__all__ = ["AttentionUnit", "BatchNormUnit", "FunctionUnit", "LayerUnit", "snapshot_of"]
