"""ONNX ops that a file in float16 has in float32, because they lose accuracy in float16 or overflow."""

from collections.abc import Mapping

# The ops, with the number of their first inputs that are floats. LayerNormalization is none of them: its sums are in float32
# by its own definition (stash_type=1). Resize has its scales in float32 in any case.
FLOAT32_OPS: Mapping[str, int] = {
    **dict.fromkeys(("Softmax", "LogSoftmax", "Exp", "Log", "Softplus", "CumSum"), 1),
    **dict.fromkeys(("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceProd", "ReduceSumSquare"), 1),
    **dict.fromkeys(("ReduceLogSum", "ReduceLogSumExp", "LpNormalization"), 1),
    **dict.fromkeys(("InstanceNormalization", "GroupNormalization"), 3),
}
