"""Compiled training: the ops that units call in it, with the bits of eager mode; and channels_last between convolutions."""

import copy
import re
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.utils import run_fw_bw_and_get_code

import qtoolkit as qt
from tests.graph.program.test_plain_units import prepared, step
from tests.graph.program.test_unit import SPECS
from tests.nets import settled


class Recorder:
    """Keeps the graphs that torch.compile makes of forward and backward, and runs them as they are."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []
        self.backend: Any = aot_autograd(fw_compiler=self._keep)

    def _keep(self, gm: fx.GraphModule, inputs: Any) -> fx.GraphModule:
        self.graphs.append(gm)
        return gm

    def ops(self) -> Counter[str]:
        """Return how often the graphs call each op of the library."""
        targets = (node.target for gm in self.graphs for node in gm.graph.nodes)
        return Counter(str(target).split(".")[1] for target in targets if str(target).startswith("qtoolkit."))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "forward"),
    [pytest.param("fixed", "float", marks=pytest.mark.sweep), ("lsq", "integer"), ("lsq, 4 bits", "float")],
)
def test_units_are_ops_that_return_codes(name: str, forward: str) -> None:
    model, recorder = prepared(name, forward), Recorder()
    twin = copy.deepcopy(model)
    torch._dynamo.reset()
    found = step(torch.compile(twin, fullgraph=True, dynamic=False, backend=recorder.backend))
    ops = recorder.ops()
    assert ops["function_fake_quant"] == 5  # before each layer
    # No second read for codes, but behind the dropout of probability 0, which older compilers make a copy.
    assert ops["quantize"] + ops["quantize_int4"] == (torch.__version__ < "2.14")
    for key, wanted in step(model).items():
        # In compiled code the gradient factor and the rate of a scale multiply rounded gradients.
        rtol = 1e-5 if "scale" in key else 0
        torch.testing.assert_close(found[f"_orig_mod.{key}" if "." in key else key], wanted, rtol=rtol, atol=0)


@pytest.mark.slow
def test_codes_of_a_tensor_that_is_changed_in_place_are_not_taken() -> None:
    layers = (nn.Linear(8, 8), nn.ReLU(), nn.Dropout(1.0, inplace=True), nn.Linear(8, 4))
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))
    model = qt.prepare(nn.Sequential(*layers).eval(), (x,), training_arithmetic="integer", backend="tensorrt")
    qt.calibrate(model, [x], progress=False)
    settled(model).train()
    torch._dynamo.reset()
    found = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
    assert torch.equal(found, model(x))
    assert torch.equal(found, found[:1].expand_as(found))  # the bias: all inputs are dropped


class Net(nn.Module):
    """A residual block: a convolution with a stride, a 1x1 one, a depthwise one, an add."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16)
        self.deep, self.norm1 = nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.BatchNorm2d(16)
        self.point, self.norm2 = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(self.norm2(self.point(torch.relu(self.norm1(self.deep(x))))) + x)
        return self.last(x)


def in_channels_last(forward: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(2, 8, 16, 16).contiguous(memory_format=torch.channels_last).requires_grad_()
    mapping = qt.QConfigMapping().set_global(qt.QConfig(SPECS["lsq"][1], SPECS["lsq"][0]))
    model = Net().train().to(memory_format=torch.channels_last)
    model = qt.prepare(model, (x.detach(),), qconfig_mapping=mapping, training_arithmetic=forward, backend="tensorrt")
    qt.calibrate(model, [x.detach()], progress=False)
    return settled(model).train(), x


def is_image(t: Any) -> bool:
    return isinstance(t, Tensor) and t.dim() == 4 and t.numel() > 0


@pytest.mark.slow
@pytest.mark.parametrize("forward", ["float", "integer"])
def test_convolutions_stay_in_channels_last(forward: str) -> None:
    model, x = in_channels_last(forward)
    recorder = Recorder()
    torch._dynamo.reset()
    torch.compile(model, fullgraph=True, dynamic=False, backend=recorder.backend)(x).square().sum().backward()
    nodes = (node for gm in recorder.graphs for node in gm.graph.nodes if node.op == "call_function")
    layers = [node for node in nodes if "quant_layer" in str(node.target)]
    assert len(layers) == 8  # forward and backward of each convolution
    for node in layers:
        results = node.meta["val"] if isinstance(node.meta["val"], tuple | list) else [node.meta["val"]]
        for t in filter(is_image, [*results, *(source.meta["val"] for source in node.all_input_nodes)]):
            assert t.is_contiguous(memory_format=torch.channels_last), (node, t.shape, t.stride())
    assert all(is_image(p.grad) <= p.grad.is_contiguous(memory_format=torch.channels_last) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("forward", [pytest.param("float", marks=pytest.mark.sweep), "integer"])
def test_inductor_copies_no_image_into_another_format(forward: str) -> None:
    model, x = in_channels_last(forward)
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, dynamic=False)
    code = "".join(run_fw_bw_and_get_code(lambda: compiled(x))[1])
    assert code.count("torch.ops.qtoolkit.quant_layer.default(") == 4
    kernels = set(re.findall(r"\bcpp_fused_\w+", code))
    assert kernels
    copies = [name for name in kernels if re.search("clone|contiguous|convolution|quant_layer|as_strided", name)]
    assert copies == []
