"""Programs in the PT2E form: their structure, their values and codes, and what the form cannot hold."""

import operator

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export.program import decomposed
from qtoolkit.export.verification.follower import Follower
from tests.nets import ConvNet, Residual, Shared, trained

X = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def converted(model: nn.Module, x: Tensor = X, backend: str = "xnnpack", mapping=None) -> nn.Module:
    prepared = qt.prepare(model.eval(), x, backend, mapping)
    qt.calibrate(prepared, [x], progress=False)
    return qt.convert(prepared)


def per_tensor(name: str) -> qt.QConfigMapping:
    """Return a mapping that gives one layer a weight with one scale."""
    qconfig = qt.backends["xnnpack"].qconfig
    spec = qt.QuantSpec(bits=8, narrow=True, axis=None)
    return qt.QConfigMapping().set_module_name(name, qt.QConfig(activation=qconfig.activation, weight=spec))


class Codes(fx.Interpreter):
    """Runs a program's graph, and keeps what its quantize ops return."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.found: list[Tensor] = []

    def run_node(self, node: fx.Node) -> object:
        result = super().run_node(node)
        if node.op == "call_function" and node.target.__name__.startswith("quantize_per"):
            self.found.append(result)
        return result


def codes_of(program: torch.export.ExportedProgram, *inputs: Tensor) -> list[Tensor]:
    interpreter = Codes(program.module())
    interpreter.run(*inputs)
    return interpreter.found


def targets(program: torch.export.ExportedProgram) -> list[str]:
    return [str(n.target).split(".")[1] for n in program.graph.nodes if n.op == "call_function"]


class Moves(nn.Module):
    """Ops that only move values between quantized layers."""

    def __init__(self, function) -> None:
        super().__init__()
        self.first, self.side, self.last = nn.Conv2d(4, 8, 1), nn.Conv2d(4, 8, 1), nn.LazyConv2d(4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function(torch.relu(self.first(x)), self.side(x)))


@pytest.mark.parametrize("backend", ["xnnpack", "onnxruntime", "tensorrt", "tvm", "qnn"])
def test_outputs_and_codes_equal_the_converted_models(backend: str) -> None:
    model = converted(trained(ConvNet(), 4, 3, 8, 8), X[:, :3], backend, per_tensor("up"))
    exported = decomposed(model, X[:, :3], None, "export_program")
    ours = Follower(model, (X[:, :3],), {})
    with torch.no_grad():
        theirs = codes_of(exported.program, X[:, :3])
    named = [(name, codes) for name, codes in zip(exported.quantizers.activations, theirs, strict=True) if name]
    assert sorted(name for name, _ in named) == sorted(name for name, calls in ours.codes.items() for _ in calls)
    assert all((ours.codes[name][0] == codes.numpy()).all() for name, codes in named)
    with torch.no_grad():
        assert torch.equal(exported.program.module()(X[:, :3]), model(X[:, :3]))


def test_each_op_has_a_dequantize_of_its_own_and_weights_are_codes() -> None:
    model = converted(trained(Residual(True), 4, 4, 8, 8))
    program = qt.export.export_program(model, X)
    dequantize = [n for n in program.graph.nodes if "dequantize" in n.name]
    assert all(len(node.users) == 1 for node in dequantize)
    assert [name for name in targets(program) if not name.endswith(("tensor", "channel"))] == (
        ["conv2d", "relu", "conv2d", "relu", "conv2d", "conv2d", "add", "relu"]
    )
    codes = model.get_submodule("conv1.weight_quantizer").codes(model.get_submodule("conv1").weight)
    assert torch.equal(program.state_dict["conv1_weight"], codes)
    weights = [name for name, value in program.state_dict.items() if name.endswith("weight")]
    assert all(program.state_dict[name].dtype == torch.int8 for name in weights)
    assert len(weights) == 4
    assert not any(name.startswith("conv1.weight") for name in program.state_dict)  # no float copy


def test_codes_of_a_constant_have_its_name_and_those_of_a_weight_the_layers() -> None:
    class Query(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.part = nn.Linear(4, 3), nn.ParameterDict({"query": torch.randn(2, 4)})

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.part["query"]) + x

    model = qt.quant_modules.replace(
        Query().eval(), qt.QConfigMapping().set_global(qt.backends["xnnpack"].qconfig), backend="tensorrt"
    )
    x = torch.randn(2, 3)
    qt.calibrate(model, [x], progress=False)
    program = qt.export.export_program(model, x)
    codes = {name for name, value in program.state_dict.items() if value.dtype == torch.int8}
    assert codes == {"part_query", "fc_weight"}


def test_ranges_scales_and_zero_points_are_those_of_the_quantizers() -> None:
    model = converted(nn.Sequential(nn.Linear(4, 3)), X[0, 0, :, :4])
    exported = decomposed(model, X[0, 0, :, :4], None, "export_program")
    program, grid = exported.program, model.get_submodule(exported.quantizers.activations[0])
    quantize = next(node for node in program.graph.nodes if node.name == "quantize_per_tensor")
    assert quantize.args[1:] == (float(grid.scale), int(grid.zero_point), -128, 127, torch.int8)
    weight = next(node for node in program.graph.nodes if "per_channel" in node.name)
    assert weight.args[3:] == (0, -127, 127, torch.int8)


def test_a_transposed_convolution_has_scales_along_its_output_channels() -> None:
    model = converted(nn.Sequential(nn.ConvTranspose2d(4, 6, 3), nn.ReLU()))
    program = qt.export.export_program(model, X)
    weight = next(node for node in program.graph.nodes if "per_channel" in node.name)
    assert weight.args[3] == 1
    assert program.state_dict["0_weight_quantizer_scale"].shape == (6,)
    assert torch.equal(program.module()(X), model(X))


class Skips(nn.Module):
    """Takes an argument between two that are given."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, shift: Tensor | None = None) -> Tensor:
        y = self.fc(x if mask is None else x * mask)
        return y if shift is None or shift.shape[0] != x.shape[0] else y + shift


def test_keyword_inputs_that_skip_an_argument() -> None:
    inputs = {"x": X[:, 0, 0], "shift": X[:, 1, 0]}
    prepared = qt.prepare(Skips().eval(), inputs, "xnnpack")
    qt.calibrate(prepared, [inputs], progress=False)
    batch = torch.export.Dim("batch", min=1)
    sizes = {"x": {0: batch}, "shift": {0: batch}}
    for shapes, counts in ((None, (4,)), (sizes, (1, 3))):
        program = qt.export.export_program(prepared, inputs, shapes)
        for count in counts:
            x, shift = X[:count, 2, 0], X[:count, 3, 0]
            assert torch.equal(program.module()(x, shift=shift), qt.convert(prepared)(x, shift=shift))


def test_sizes_stay_dynamic() -> None:
    batch = torch.export.Dim("batch", min=1)
    model = converted(trained(ConvNet(), 4, 3, 8, 8), X[:, :3], mapping=per_tensor("up"))
    program = qt.export.export_program(model, (X[:, :3],), dynamic_shapes=({0: batch},))
    for count in (1, 3):
        assert torch.equal(program.module()(X[:count, :3]), model(X[:count, :3]))


@pytest.mark.parametrize(
    "function",
    [
        lambda a, b: F.max_pool2d(a, 2),
        lambda a, b: torch.cat([a, b], 1),
        lambda a, b: operator.add(*a.chunk(2, 1)),
        lambda a, b: F.pad(a[:, ::2], (1, 1, 0, 0)),
        lambda a, b: F.pixel_shuffle(a, 2).transpose(2, 3),
        lambda a, b: F.interpolate(a, scale_factor=2),
        lambda a, b: a.flatten(2).unflatten(2, (4, 16)),
        lambda a, b: a.max(3, keepdim=True)[0] + a.amin(2, keepdim=True),
    ],
)
def test_ops_that_move_values_stand_between_pairs(function) -> None:
    net = Moves(function)
    net(X)
    program = qt.export.export_program(model := converted(net), X)
    takers = {"conv2d", "add", "max_pool2d", "cat", "pad", "slice", "pixel_shuffle", "transpose", "upsample_nearest2d"}
    takers |= {"max", "amin"}
    for node in program.graph.nodes:
        name = str(node.target).split(".")[1] if node.op == "call_function" and "aten" in str(node.target) else ""
        if name in {*takers, "flatten", "unflatten", "view", "reshape"} and node.args[0] not in ([], None):
            sources = node.args[0] if isinstance(node.args[0], list | tuple) else [node.args[0]]
            assert all("dequantize" in source.name for source in sources), (name, program)
    assert torch.equal(program.module()(X), model(X))


@pytest.mark.parametrize("quantized", [True, False])
def test_a_mean_over_the_image_keeps_the_dimensions(quantized: bool) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.head = nn.Conv2d(4, 8, 1), nn.Linear(8, 3)

        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(self.conv(x)).mean((2, 3))
            return self.head(x if quantized else torch.sin(x))

    program = qt.export.export_program(model := converted(Net()), X)
    mean = next(node for node in program.graph.nodes if node.name == "mean")
    assert mean.args[1:] == ([2, 3], True)
    assert "flatten" in targets(program)
    assert torch.equal(program.module()(X), model(X))


def test_a_shared_layer_is_stored_once() -> None:
    x = X[0, 0, :, :4]
    program = qt.export.export_program(model := converted(Shared(), x), x)
    assert [name for name in program.state_dict if "weight" in name and "quantizer" not in name] == ["fc_weight"]
    assert torch.equal(program.module()(x), model(x))


@pytest.mark.parametrize("quantizer", ["lsq", "apot", "dsq"])
def test_learned_weights_are_stored_as_their_codes(quantizer: str) -> None:
    weight = qt.QuantSpec(bits=4, quantizer=quantizer)
    activation = qt.backends["xnnpack"].qconfig.activation
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation=activation, weight=weight))
    model = converted(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), mapping=mapping)
    program = qt.export.export_program(model, X)
    assert program.state_dict["0_weight"].dtype == torch.int8
    # The program multiplies by 1 / scale where the model divides: a value between two integers may get the next one.
    steps = ((program.module()(X) - model(X)) / model.get_submodule("activation_quantizers._1").scale).abs()
    assert steps.max() < 1.01
    assert steps.gt(0.5).sum() <= 2


def test_a_prepared_model_stays_as_it_is() -> None:
    prepared = qt.prepare(nn.Sequential(nn.Linear(4, 3)), X[0, 0, :, :4], "xnnpack").train()
    qt.calibrate(prepared, [X[0, 0, :, :4]], progress=False)
    before = {name: value.clone() for name, value in prepared.state_dict().items()}
    qt.export.export_program(prepared, X[0, 0, :, :4])
    assert prepared.training
    assert all(torch.equal(value, before[name]) for name, value in prepared.state_dict().items())


def test_a_program_is_saved_and_loaded(tmp_path) -> None:
    model = converted(nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()))
    program = qt.export.export_program(model, X)
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    assert torch.equal(loaded.module()(X), model(X))


def test_torch_multiplies_by_the_reciprocal_so_codes_differ_in_the_middle_between_two_alone() -> None:
    model = converted(nn.Sequential(nn.Linear(4, 3)), X[0, 0, :, :4])
    exported = decomposed(model, X[0, 0, :, :4], None, "export_program")
    grid, steps = model.get_submodule(exported.quantizers.activations[0]), torch.arange(-64, 64) + 0.5
    for x, allowed in ((steps * grid.scale, 1), ((steps + 0.1) * grid.scale, 0)):
        (codes, *_) = codes_of(qt.export.export_program(model, x.reshape(-1, 4)), x.reshape(-1, 4))
        gap = (codes.flatten().int() - grid.codes(x).int()).abs()
        assert int(gap.max()) == allowed


REFUSED = {
    "format='e4m3'": qt.QuantSpec(format="e4m3", axis=0),
    "a scale for each block of 4 channels": qt.QuantSpec(bits=8, axis=1, group_size=4),
}


def test_errors_of_what_it_shares_with_export_onnx_name_it() -> None:
    x, qconfig = torch.randn(4, 64), qt.QConfig(activation=qt.QuantSpec(format="mxfp4"), weight=qt.QuantSpec(axis=0))
    model = qt.prepare(nn.Linear(64, 8).eval(), x, "xnnpack", qt.QConfigMapping().set_global(qconfig))
    with pytest.raises(ValueError, match=r"^export_program: 'activation_quantizers.\w+' cannot be written: its scales"):
        qt.export.export_program(model, x)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_the_form_cannot_hold_is_refused(reason: str) -> None:
    qconfig = qt.QConfig(activation=qt.QuantSpec(bits=8), weight=REFUSED[reason])
    model = converted(nn.Sequential(nn.Linear(4, 3)), X[0, 0, :, :4], mapping=qt.QConfigMapping().set_global(qconfig))
    with pytest.raises(ValueError, match=f"cannot express '0.weight_quantizer', which has {reason}"):
        qt.export.export_program(model, X[0, 0, :, :4])


def test_scales_of_groups_of_a_transposed_convolution_are_refused() -> None:
    qconfig = qt.QConfig(activation=qt.backends["xnnpack"].qconfig.activation, weight=qt.QuantSpec(bits=8, axis=1))
    mapping = qt.QConfigMapping().set_module_name("0", qconfig)
    model = converted(nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2)), mapping=mapping)
    with pytest.raises(ValueError, match="6 scales along the output channels of 2 groups .* axis=None"):
        qt.export.export_program(model, X)


def test_dynamic_activations_are_refused() -> None:
    spec = qt.QuantSpec(bits=8, dynamic=True)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation=spec, weight=qt.QuantSpec(bits=8, axis=0)))
    model = converted(nn.Sequential(nn.Linear(4, 3)), X[0, 0, :, :4], mapping=mapping)
    with pytest.raises(ValueError, match="computed from each input"):
        qt.export.export_program(model, X[0, 0, :, :4])


def test_a_model_in_half_precision_is_refused() -> None:
    model = converted(nn.Sequential(nn.Linear(4, 3)), X[0, 0, :, :4]).bfloat16()
    with pytest.raises(ValueError, match=r"bfloat16 .* export model.float\(\)"):
        qt.export.export_program(model, X[0, 0, :, :4].bfloat16())


def test_a_float_model_is_refused() -> None:
    with pytest.raises(TypeError, match="export_program: the model must be what"):
        qt.export.export_program(nn.Linear(4, 3), X[0, 0, :, :4])
