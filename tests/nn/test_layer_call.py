"""The object of each call of a layer: its links, its number, its kernel, and what copies of the layer share."""

import copy
import gc
import weakref

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.nn.layer_call import LayerCall
from tests.nets import settled

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """A layer on two grids: its input, and its own output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(4, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.conv(x) * 0.5).tanh()


def prepared(training: bool = False) -> nn.Module:
    model = qt.prepare(Twice().eval(), X, "onnxruntime")
    qt.calibrate(model, [X], progress=False)
    return model.train(training)


def test_each_call_has_the_quantizer_of_its_input() -> None:
    model = prepared()
    conv = model.get_submodule("conv")
    first, second = conv.layer_calls
    grids = [model.get_submodule(f"activation_quantizers.{name}") for name in ("x", "mul")]
    assert [call.number for call in (first, second)] == [0, 1]
    assert [call.input_quantizer(conv) for call in (first, second)] == grids
    assert [call.summed_quantizer(conv) for call in (first, second)] == grids
    assert conv.source is grids[0]
    assert torch.equal(conv.sum_steps(), first.sum_steps(conv))
    assert not torch.equal(first.sum_steps(conv), second.sum_steps(conv))
    assert torch.equal(conv.bias_in_sums(conv.bias, second), second.bias_in_sums(conv, conv.bias))


def test_the_layer_registers_the_kernel_of_each_call() -> None:
    model = prepared()
    integer = qt.convert(model, arithmetic="integer")
    conv = integer.get_submodule("conv")
    names = ["integer_kernel", "integer_kernel_1"]
    assert [name for name, _ in conv.named_children() if "kernel" in name] == names
    assert [call.kernel(conv) for call in conv.layer_calls] == [conv.get_submodule(name) for name in names]
    assert list(integer.state_dict()) == list(qt.convert(model).state_dict())
    assert {type(module) for module in conv.to_float().modules()} == {nn.Conv2d}


def test_a_call_that_is_removed_leaves_the_other_with_its_grid() -> None:
    """Both as the model is, and as it is compiled and converted again."""
    model = prepared(training=True)
    conv, (first, second) = model.get_submodule("conv"), (n for n in model.graph.nodes if n.target == "conv")
    wanted = conv.layer_calls[1].sum_steps(conv)
    first.replace_all_uses_with(first.all_input_nodes[0])
    model.graph.erase_node(first)
    model.recompile()
    assert second.kwargs == {"call": 1}
    assert torch.equal(conv.layer_calls[1].sum_steps(conv), wanted)
    assert conv.layer_calls[0].source is None
    model.eval()
    y = model(X)
    assert torch.equal(qt.convert(model)(X), y)
    assert torch.equal(copy.deepcopy(model)(X), y)


def test_a_call_of_a_layer_that_the_graph_has_left_takes_any_values() -> None:
    """As an adapter that takes the layer's place calls it, with the number of the call."""
    conv = prepared().get_submodule("conv")
    conv.unlink()
    assert [call.number for call in conv.layer_calls] == [0, 1]
    assert not any(conv.input_sources())
    assert conv.bias_in_sums(conv.bias, conv.layer_calls[1]) is conv.bias
    assert torch.equal(conv(X, call=1), conv(X))


class TwiceNormalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(self.norm(self.conv(x)).relu())).relu()


@pytest.mark.slow
def test_calls_with_a_batch_norm_are_compiled() -> None:
    """The second call lets the scales, which backward of the first one reads, take the factor again."""
    spec = qt.QuantSpec(quantizer="lsq")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec.with_(axis=0)))
    model = qt.prepare(TwiceNormalized().train(), X, "tensorrt", qconfig_mapping=mapping)
    qt.calibrate(model, [X], progress=False)
    settled(model).train()
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    torch.compile(model, backend="aot_eager", fullgraph=True)(X).square().sum().backward()
    other(X).square().sum().backward()
    for found, wanted in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-4, atol=1e-4)
    for found, wanted in zip(model.buffers(), other.buffers(), strict=True):
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("batch_norm", [False, True])
def test_a_layer_is_freed_with_its_last_reference(batch_norm: bool) -> None:
    """A call holds no layer: large weights would wait for the garbage collector."""
    layers = [nn.Conv2d(4, 4, 3), *([nn.BatchNorm2d(4)] if batch_norm else [])]
    model = qt.quant_modules.replace(nn.Sequential(*layers).train(), backend="onnxruntime")
    qt.calibrate(model, [X], progress=False)
    layer = weakref.ref(model[0])
    gc.collect()
    gc.disable()
    try:
        del model, layers
        assert layer() is None
    finally:
        gc.enable()


def test_a_layer_without_a_graph_has_one_call() -> None:
    layer = qt.nn.QuantLinear(4, 2, weight_spec=qt.QuantSpec(axis=0))
    (call,) = layer.layer_calls
    assert (call.number, call.source, call.integer_bias, call.kernel(layer)) == (0, None, False, None)
    assert isinstance(call, LayerCall)
    assert layer.bias_in_sums(layer.bias) is layer.bias
