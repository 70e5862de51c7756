"""Simplify an exported graph: fold constants, and remove what does nothing.

This is what torch's `ONNXProgram.optimize` does, without the rules of onnxscript that change values: they take 1e-9 for 0 and
1.000001 for 1 (so that zeros give NaN in x / (x.norm() + 1e-9)), lose the sum of `index_add`, and merge a ReLU and clips into
one Clip, whose ends may have changed places. The rule that makes a Split of two Slices is left out too: onnxscript walks the
whole graph at each node for a pattern of two outputs, which is a quarter of the time of exporting a transformer of 36 blocks.
"""

import onnx_ir
from onnx_ir.passes import common
from onnxscript import optimizer, rewriter
from onnxscript.rewriter import onnx_fusions
from onnxscript.rewriter.rules import common as rules

# The rules that keep values, by their public names without "_rule". A version of onnxscript may lack one: then more nodes stay.
NAMES = """
    one_reshape_matmul_reshape two_reshapes_matmul_reshape cast_constant_of_shape
    cast_constant_of_shape_without_value collapse_slice collapse_slice2 materialize_reshape_shape successive_relu
    cast_cast no_op_cast no_op_expand flatten_to_reshape reshape_reshape no_op_transpose
    transpose_transpose unsqueeze_unsqueeze squeeze_reshape_1d no_op_dynamic_scatter_nd dropout_inference
    normalize_pad_format_conv fuse_pad_into_conv fuse_batchnorm_into_conv fuse_batchnorm_into_conv_transpose
    fuse_batchnorm_into_gemm remove_optional_bias_from_conv remove_optional_bias_from_conv_transpose
    remove_optional_bias_from_gemm
"""
RULES = [getattr(rules, f"{name}_rule") for name in NAMES.split() if hasattr(rules, f"{name}_rule")]
ROUNDS = 2  # as torch does


def simplify(model: onnx_ir.Model) -> None:
    """Simplify a model in place."""
    common.InlinePass()(model)
    for _ in range(ROUNDS):
        folded = optimizer.fold_constants_ir(model).modified
        rewritten = rewriter.RewritePass(RULES)(model).modified
        onnx_ir.passes.Sequential(
            common.RemoveUnusedNodesPass(),
            common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
            common.RemoveUnusedOpsetsPass(),
        )(model)
        if not (folded or rewritten):
            break
    onnx_fusions.fuse(model)
    onnx_ir.passes.Sequential(
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),
        common.DeduplicateInitializersPass(),
        common.CommonSubexpressionEliminationPass(),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)
