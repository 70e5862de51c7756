"""E4M3 quantizers export as TensorRT's FP8 ops, in both of torch's exporters."""

import pytest
import torch

from qtoolkit.compat.pytorch_quantization import enable_onnx_export
from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor

onnx = pytest.importorskip("onnx")
E4M3 = QuantDescriptor(num_bits=(4, 3))
STANDARD = {"TRT_FP8QuantizeLinear": "QuantizeLinear", "TRT_FP8DequantizeLinear": "DequantizeLinear"}


def calibrated(dtype: torch.dtype) -> torch.nn.Module:
    layer = quant_nn.QuantLinear(16, 32, quant_desc_input=E4M3, quant_desc_weight=E4M3)
    layer.input_quantizer.amax, layer.weight_quantizer.amax = 2.5, layer.weight.detach().abs().max()
    return layer.eval().to(dtype)


def inputs(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(0)).to(dtype)


def exported(model: torch.nn.Module, x: torch.Tensor, path, dynamo: bool):
    with enable_onnx_export():
        torch.onnx.export(model, (x,), path, opset_version=19 if dynamo else 17, dynamo=dynamo, verbose=False)
    return onnx.load(path)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_fp8_exports_as_tensorrts_ops(dtype, dynamo, tmp_path):
    graph = exported(calibrated(dtype), inputs(dtype), tmp_path / "m.onnx", dynamo).graph
    nodes = [node for node in graph.node if node.domain == "trt"]
    assert sorted(node.op_type for node in nodes) == sorted([*STANDARD, *STANDARD])
    constants = {t.name for t in graph.initializer} | {n.output[0] for n in graph.node if n.op_type == "Constant"}
    assert all(node.input[1] in constants for node in nodes)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [True, False])
def test_onnxs_fp8_pair_in_their_place_computes_what_the_model_does(dynamo, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    model = calibrated(torch.float32)
    file = exported(model, inputs(torch.float32), tmp_path / "m.onnx", dynamo)
    zero = onnx.helper.make_tensor("zero", onnx.TensorProto.FLOAT8E4M3FN, [], [0])
    file.graph.initializer.append(zero)
    for node in file.graph.node:
        if node.domain == "trt":
            node.domain, node.op_type = "", STANDARD[node.op_type]
            node.input.append("zero")
    del file.opset_import[:], file.graph.value_info[:]
    file.opset_import.append(onnx.helper.make_opsetid("", 19))
    session = onnxruntime.InferenceSession(file.SerializeToString())
    (y,) = session.run(None, {session.get_inputs()[0].name: inputs(torch.float32).numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(inputs(torch.float32)), rtol=1e-5, atol=1e-5)
