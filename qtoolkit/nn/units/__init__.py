"""Units of a prepared model in training: modules that one op computes while they are as they were when that was decided."""

from qtoolkit.nn.units.base import snapshot_of
from qtoolkit.nn.units.batch_norm import BatchNormUnit, Names
from qtoolkit.nn.units.function import FunctionUnit
from qtoolkit.nn.units.layer import LayerUnit

__all__ = ["BatchNormUnit", "FunctionUnit", "LayerUnit", "Names", "snapshot_of"]
