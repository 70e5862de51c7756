"""torchao's PT2E quantization by its quantizer for x86."""

import copy
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torchao.quantization.pt2e import move_exported_model_to_eval, move_exported_model_to_train
from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_qat_pt2e
from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
    X86InductorQuantizer,
    get_default_x86_inductor_quantization_config,
)


def qat_model(model: nn.Module, x: Tensor) -> nn.Module:
    """Its default configuration for training, which observes while it quantizes."""
    return qat_model_as_exported(_without_shared_modules(model), x)


def _without_shared_modules(model: nn.Module) -> fx.GraphModule:
    """Give each call its own module: the quantizer refuses torchvision's ResNets, whose blocks call one ReLU twice."""
    traced, seen = fx.symbolic_trace(model), set()
    for node in traced.graph.nodes:
        node.meta.clear()  # export would take the module of the call from here
        if node.op != "call_module":
            continue
        if node.target in seen:
            own = f"{node.target}_{node.name}"
            traced.add_submodule(own, copy.deepcopy(traced.get_submodule(node.target)))
            node.target = own
        seen.add(node.target)
    traced.recompile()
    return traced


def qat_model_as_exported(model: nn.Module, x: Tensor) -> nn.Module:
    """The same for models that symbolic tracing does not take, which torch.export captures."""
    exported = torch.export.export(model, (x,)).module()
    quantizer = X86InductorQuantizer().set_global(get_default_x86_inductor_quantization_config(is_qat=True))
    return move_exported_model_to_train(prepare_qat_pt2e(exported, quantizer))


def export(model: nn.Module, x: Tensor, path: Path) -> nn.Module:
    """Converted, by the exporter that takes its pairs."""
    converted = convert_pt2e(move_exported_model_to_eval(model))
    torch.onnx.export(converted, (x,), path, dynamo=True, verbose=False)
    return converted
