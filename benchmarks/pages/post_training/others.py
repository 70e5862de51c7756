"""Other tools on the same images: onnxruntime's quantize_static and NNCF's post-training quantization."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.pages.export import in_onnxruntime, on_tensors, quantize_static
from benchmarks.pages.post_training.methods import ALL_BITS, W8A8, Bits, Forward, Method, Network

GROUP = "other tools"
OPSET = 21  # the first with codes of four bits


def _static(calibration: str, like_ours: bool = True) -> Callable[[Network, Bits], Forward]:
    def quantize(network: Network, bits: Bits) -> Forward:
        with tempfile.TemporaryDirectory() as folder:
            path = quantized_file(network, bits, calibration, like_ours, Path(folder))
            return on_tensors(in_onnxruntime(path, torch.get_num_threads()))

    return quantize


def quantized_file(network: Network, bits: Bits, calibration: str, like_ours: bool, folder: Path) -> Path:
    """Return the file of quantize_static, which quantizes where our backend "academic" does, or where it does by itself.

    It quantizes a tensor for all ops that take it: residual adds take the codes of their shortcuts, too.
    """
    from onnxruntime import quantization

    source, target = folder / "float.onnx", folder / "quantized.onnx"
    example, shapes = network.images[:2], ({0: torch.export.Dim.DYNAMIC},)
    torch.onnx.export(
        network.model, (example,), source, dynamo=True, dynamic_shapes=shapes, opset_version=OPSET, verbose=False
    )
    quantize_static(
        source,
        target,
        network.batches(64),
        activation_type=quantization.QuantType[f"QUInt{bits.activations}"],
        weight_type=quantization.QuantType[f"QInt{bits.weights}"],
        calibrate_method=quantization.CalibrationMethod[calibration],
        extra_options={**_first_and_last(source, bits), **(LAYERS_ONLY if like_ours else {})},
        op_types_to_quantize=list(LAYERS) if like_ours else None,
    )
    return target


LAYERS = ("Conv", "Gemm")
LAYERS_ONLY = {"OpTypesToExcludeOutputQuantization": list(LAYERS)}


def _first_and_last(source: Path, bits: Bits) -> dict[str, Any]:
    """Return the options that give the weight and the input of the first and the last layer eight bits."""
    import onnx
    from onnxruntime.quantization import QuantType

    layers = [node for node in onnx.load(source).graph.node if node.op_type in LAYERS]
    overrides: dict[str, Any] = {}
    for node in (layers[0], layers[-1]) if bits != W8A8 else ():
        overrides[node.input[0]] = [{"quant_type": QuantType.QUInt8}]
        overrides[node.input[1]] = [{"quant_type": QuantType.QInt8, "axis": 0}]
        if node is layers[-1]:
            overrides[node.output[0]] = [{"quant_type": QuantType.QUInt8}]
    return {"TensorQuantOverrides": overrides} if overrides else {}


def _nncf(preset: str) -> Callable[[Network, Bits], Forward]:
    def quantize(network: Network, bits: Bits) -> Forward:
        os.environ.setdefault(
            "NNCF_EXTENSION_LOAD_TIMEOUT", "0"
        )  # its extension is compiled at first use, for a minute
        import nncf
        from nncf.quantization.advanced_parameters import QuantizationParameters

        parameters: dict[str, Any] = {}
        if bits != W8A8:
            parameters["weights_quantization_params"] = QuantizationParameters(num_bits=bits.weights)
            parameters["activations_quantization_params"] = QuantizationParameters(num_bits=bits.activations)
        batches = network.batches(64)
        result: Forward = nncf.quantize(
            network.model,
            nncf.Dataset(batches),
            preset=nncf.QuantizationPreset[preset],
            subset_size=len(batches),
            advanced_parameters=nncf.AdvancedQuantizationParameters(**parameters),
        )
        return result

    return quantize


OTHERS: Mapping[str, Method] = {
    **{
        f"quantize_static, {name}": Method(GROUP, _static(calibration), ALL_BITS)
        for name, calibration in (("minmax", "MinMax"), ("entropy", "Entropy"), ("percentile", "Percentile"))
    },
    "quantize_static, own placement": Method(GROUP, _static("MinMax", like_ours=False)),
    "NNCF, performance": Method(GROUP, _nncf("PERFORMANCE")),
    "NNCF, mixed": Method(GROUP, _nncf("MIXED")),
}
