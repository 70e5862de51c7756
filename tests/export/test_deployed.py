"""All codes end to end in onnxruntime at its default optimizations and in OpenVINO."""

import functools
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.export import verify
from qtoolkit.export.verification.codes import CodeCount
from qtoolkit.export.verification.runtimes import onnxruntime_cpu
from qtoolkit.runtimes import table
from qtoolkit.runtimes.execution import ExecutedLayer
from tests.export.qdq_files import File

X = torch.linspace(-1, 1, 2 * 3 * 12 * 12).reshape(2, 3, 12, 12).roll(7, 3)


class Block(nn.Module):
    """Convolutions, a residual add, a pool, a float tanh and a linear layer, without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, bias=False), nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.third = nn.Conv2d(8, 8, 1, bias=False)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(200, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        return self.fc(torch.tanh(self.pool(self.third(self.second(x) + x)).flatten(1)))


def exact_net(model: nn.Module, signed: bool, x: Tensor = X) -> nn.Module:
    """Convert a model whose sums are exact, so that every runtime computes the same codes on every processor.

    Scales are powers of two, and weights have seven bits, whose products do not saturate without VNNI.
    """
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -1, 1)
    activation = qt.QuantSpec(signed=signed, symmetric=signed, pow2_scale=signed)
    config = qt.QConfig(activation, qt.QuantSpec(bits=7, pow2_scale=True, axis=0))
    prepared = qt.prepare(model.eval(), x, "onnxruntime", qconfig_mapping=qt.QConfigMapping().set_global(config))
    qt.calibrate(prepared, [x], progress=False)
    converted = qt.convert(prepared)
    for name, module in converted.named_modules():
        if isinstance(module, qt.Grid) and name.startswith("activation_quantizers"):
            module.scale.copy_(2.0 ** torch.ceil(torch.log2(module.scale)))
            if module.zero_point is not None:  # an even one: kernels may add it before they round half to even
                module.zero_point.copy_(2 * torch.round(module.zero_point / 2))
    return converted


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], tuple[nn.Module, str]]:
    """The block with signed or unsigned codes and its file, for all tests that read them."""

    @functools.cache
    def once(signed: bool) -> tuple[nn.Module, str]:
        model = exact_net(Block(), signed)
        return model, qt.export_onnx(model, X, tmp_path_factory.mktemp("exported") / "m.onnx").path

    return once


@pytest.fixture
def block(exported: Callable[[bool], tuple[nn.Module, str]]) -> tuple[nn.Module, str]:
    """The block with unsigned codes, which onnxruntime computes in integers."""
    return exported(False)


@pytest.mark.parametrize("optimized", [True, False])
@pytest.mark.parametrize("signed", [False, True])
def test_every_code_is_compared(exported, signed: bool, optimized: bool) -> None:
    model, path = exported(signed)
    found = verify(model, X, path, optimized=optimized)
    found.check()
    codes = found.runtimes["onnxruntime"]
    assert codes.not_compared == ()
    assert list(codes.by_quantizer) == [
        f"activation_quantizers.{n}" for n in ("x", "relu", "second", "add", "third", "tanh")
    ]
    sizes = (X.numel(), 2 * 8 * 100, 2 * 8 * 100, 2 * 8 * 100, 2 * 8 * 100, 2 * 200)
    *others, behind_float = codes.by_quantizer.values()
    assert others == [CodeCount(size) for size in sizes[:-1]]
    assert behind_float.compared == sizes[-1]
    assert codes.changed_by_reading == 0.0
    integer = {(layer.name, layer.kernel) for layer in codes.integer_layers}
    if optimized and not signed:
        assert {("first", "QLinearConv"), ("second", "QLinearConv"), ("node_add", "QLinearAdd")} <= integer
        assert [layer.name for layer in codes.float_layers] == ["node_tanh"]
    if not optimized:
        assert integer == set()
        assert {"first", "second", "fc"} <= {layer.name for layer in codes.float_layers}


def test_signed_codes_are_read_where_the_runtime_shifts_them(tmp_path) -> None:
    chain = nn.Sequential(*(nn.Conv2d(*sizes, 3, bias=False) for sizes in ((3, 4), (4, 8), (8, 2), (2, 2))))
    model = exact_net(chain, True)
    codes = verify(model, X, qt.export_onnx(model, X, tmp_path / "m.onnx").path).runtimes["onnxruntime"]
    assert [layer.kernel for layer in codes.layers] == ["QLinearConv"] * 3 + ["Conv"]
    assert len(codes.by_quantizer) == 4
    codes.check()


def test_the_first_difference_is_named_and_where_differences_begin(tmp_path) -> None:
    sizes = ((3, 4), (4, 4), (4, 6), (6, 2))
    layers = [layer for size in sizes for layer in (nn.Conv2d(*size, 1, bias=False), nn.ReLU())]
    model = exact_net(nn.Sequential(*layers, nn.Conv2d(2, 2, 1, bias=False)), False)
    path = qt.export_onnx(model, X, tmp_path / "m.onnx", exporter="torchscript").path
    proto = onnx.load(path)
    weight = next(t for t in proto.graph.initializer if list(t.dims) == [4, 4, 1, 1])
    codes = numpy_helper.to_array(weight).copy()
    codes[:, :, 0, 0] = np.roll(codes[:, :, 0, 0], 1)
    weight.CopyFrom(numpy_helper.from_array(codes, weight.name))
    onnx.save(proto, path)
    result = verify(model, X, path)
    with pytest.raises(
        RuntimeError, match=r"the weights of the file differ from the model's at 2\.weight_quantizer .+ 16 differ"
    ):
        result.check()
    found = result.runtimes["onnxruntime"]
    assert found.other_weights == ("2.weight_quantizer",)
    with pytest.raises(RuntimeError, match=r"in onnxruntime 1\..+; the first at 'activation_quantizers._3': .+ differ"):
        replace(found, weights={}).check()
    quantizers = list(found.by_quantizer)
    assert quantizers[1:] == [f"activation_quantizers._{place}" for place in (1, 3, 5, 7)]
    assert [name for name in quantizers if found.by_quantizer[name].differing] == quantizers[2:]
    assert found.first_difference == quantizers[2]
    assert [name for name in quantizers if found.layer_by_layer[name].differing] == [quantizers[2]]
    assert replace(found.layer_by_layer[quantizers[2]], ties=0) == found.by_quantizer[quantizers[2]]
    assert f"first difference: {quantizers[2]}" in str(found)
    assert f"they begin at {quantizers[2]}\n" in f"{found}\n"


class Twice(nn.Module):
    """A layer called on two tensors and on one of them again: three calls of its quantizer, two nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.fc(x) + self.fc(x * 0.5)


def test_fewer_nodes_than_calls(tmp_path) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    model = exact_net(nn.Sequential(Twice(), nn.ReLU(), nn.Linear(8, 2, bias=False)), False, x)
    path = qt.export_onnx(model, x, tmp_path / "m.onnx").path
    found = verify(model, x, path).runtimes["onnxruntime"]
    assert found.not_compared == ()
    assert found.codes.differing == 0


class FromZeros(nn.Module):
    """A recurrent convolution whose state begins with zeros, which the concat quantizes with the other states."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Conv2d(3 + 4, 4, 3, padding=1, bias=False), nn.Conv2d(4, 2, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        state = torch.zeros(x.size(0), 4, x.size(2), x.size(3))
        for _ in range(3):
            state = torch.relu(self.cell(torch.cat([x, state], 1)))
        return self.head(state)


def test_a_constant_that_shares_the_quantizer_of_other_tensors_is_compared(tmp_path) -> None:
    model = exact_net(FromZeros(), signed=False)
    path = qt.export_onnx(model, X, tmp_path / "m.onnx", verify=False).path
    codes = verify(model, X, path).runtimes["onnxruntime"]
    assert (codes.codes.differing, codes.not_compared) == (0, ())
    assert codes.by_quantizer["activation_quantizers.cat"].compared == X.numel() + 3 * 2 * 4 * 12 * 12
    assert codes.check().value == "equal"


def test_codes_that_the_runtime_does_not_have_are_named(block, monkeypatch) -> None:
    model, path = block
    monkeypatch.setattr(onnxruntime_cpu, "_tensors_with_codes", lambda *_: {})
    with pytest.raises(RuntimeError, match=r"does not return the quantized values of 'activation_quantizers.x', "):
        verify(model, X, path).check()


def test_openvino_is_within_its_rounding(tmp_path) -> None:
    pytest.importorskip("openvino")
    layers = (nn.Sequential(nn.Conv2d(*sizes, 3, bias=False), nn.ReLU()) for sizes in ((3, 4), (4, 8), (8, 2)))
    model = exact_net(nn.Sequential(*layers, nn.Conv2d(2, 2, 1, bias=False)), False)
    path = qt.export_onnx(model, X, tmp_path / "m.onnx", exporter="torchscript").path
    found = verify(model, X, path, runtimes=("onnxruntime", "openvino"))
    found.check()
    codes = found.runtimes["openvino"]
    assert codes.not_compared == ()
    assert codes.codes.compared == found.runtimes["onnxruntime"].codes.compared > 0
    assert [layer.kernel for layer in codes.integer_layers] == ["Convolution"] * 4
    assert codes.runtime.startswith("openvino 20")


def test_the_type_of_float_ops_is_named_where_it_is_narrower(block) -> None:
    """OpenVINO computes float ops in bfloat16 where the processor has instructions for it."""
    openvino = pytest.importorskip("openvino")
    model, path = block
    codes = verify(model, X, path, runtimes=("openvino",)).runtimes["openvino"]
    narrow = openvino.Core().get_property("CPU", "INFERENCE_PRECISION_HINT") == openvino.Type.bf16
    assert ("float ops in bf16" in codes.runtime) == narrow
    assert codes.float_layers


def test_bad_arguments_are_errors(block, tmp_path, monkeypatch) -> None:
    model, path = block
    with pytest.raises(ValueError, match=r"unknown runtime of verify: 'onnxrutime'; did you mean 'onnxruntime'\?"):
        verify(model, X, path, runtimes=("onnxrutime",))
    with pytest.raises(TypeError, match="verify: inputs do not match"):
        verify(model, (X, X), path)
    broken = onnx.load(path)
    del broken.graph.node[3]
    onnx.save(broken, tmp_path / "broken.onnx")
    with pytest.raises(ValueError, match="is not a valid ONNX model"):
        verify(model, X, tmp_path / "broken.onnx")
    unknown = onnx.load(path)
    unknown.graph.node[-1].domain = "nobody"
    unknown.opset_import.append(onnx.helper.make_opsetid("nobody", 1))
    onnx.save(unknown, tmp_path / "unknown.onnx")
    with pytest.raises(RuntimeError, match="cannot load '.*' at its default optimization level"):
        verify(model, X, tmp_path / "unknown.onnx")
    more = onnx.load(path)
    more.graph.input.append(onnx.helper.make_tensor_value_info("more", 1, [1]))
    onnx.save(more, tmp_path / "more.onnx")
    with pytest.raises(ValueError, match=r"verify: the file takes 2 tensors \(x, more\), got 1"):
        verify(model, X, tmp_path / "more.onnx")
    monkeypatch.setattr(table, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="verify needs openvino, which is not installed; run: pip install "):
        verify(model, X, path, runtimes=("openvino",))


@pytest.mark.parametrize("compare", [verify, qt.export.verify_onnx])
@pytest.mark.parametrize("route", ["float", "prepared", "replaced", "none", "number"])
def test_what_was_not_converted_is_an_error(route: str, compare, block) -> None:
    _, path = block
    routes = {
        "float": Block,
        "prepared": lambda: qt.prepare(Block().eval(), X, "onnxruntime"),
        "replaced": lambda: qt.quant_modules.replace(Block(), backend="tensorrt10"),
        "none": lambda: None,
        "number": lambda: 3,
    }
    got = {"none": "None", "number": "3"}.get(route, "a Block")
    with pytest.raises(
        TypeError, match=f"{compare.__name__}: the model must be what qtoolkit.convert returned, got {got} "
    ):
        compare(routes[route](), X, path)


@pytest.mark.parametrize("compare", [verify, qt.export.verify_onnx])
def test_inputs_in_a_list_and_a_model_as_the_path_are_errors(compare, block) -> None:
    model, path = block
    with pytest.raises(
        TypeError, match=f"{compare.__name__}: inputs do not fit the model: a list is one argument, 'x'"
    ):
        compare(model, [X], path)
    with pytest.raises(
        TypeError, match=f"{compare.__name__}: path must be the path of the exported file, got a GraphModule"
    ):
        compare(model, X, model)


def test_runtimes_are_a_sequence_of_names(block) -> None:
    model, path = block
    with pytest.raises(TypeError, match=r"verify: runtimes must be a sequence of names, .* runtimes=\['onnxruntime'\]"):
        verify(model, X, path, "onnxruntime")
    with pytest.raises(ValueError, match=r"verify: runtimes must be a sequence of at least one of the names, got \(\)"):
        verify(model, X, path, ())
    with pytest.raises(TypeError, match=r"compare_runtimes: runtimes must be a sequence of names, got 3\."):
        qt.export.compare_runtimes(path, runtimes=3)


def test_only_onnxruntime_runs_without_optimizations(block) -> None:
    pytest.importorskip("openvino")
    model, path = block
    with pytest.raises(ValueError, match=r"optimized=False needs runtimes=\('onnxruntime',\), got \('openvino',\)"):
        verify(model, X, path, runtimes=("openvino",), optimized=False)


def test_ties_behind_float_ops_are_allowed_by_their_share() -> None:
    spread = {"a": CodeCount(1_000_000), "b": CodeCount(1_000_000, 19, 1), "c": CodeCount(1_000_000, 5_000, 6)}
    begun = {**spread, "c": CodeCount(1_000_000)}
    found = qt.export.RuntimeCodes("runtime", spread, 0.0, (), 0, (), 0.0, 1e-5, layer_by_layer=begun)
    with pytest.warns(
        UserWarning, match=r"end to end 5019 of 3000000 differ .*layer by layer, .* 19 of 3000000 differ"
    ):
        assert found.check() is qt.export.Verdict.ROUNDING
    assert found.layer_codes == CodeCount(3_000_000, 19, 1)
    for worse in (
        replace(found, share=0.0),  # all layers in integers: none may differ end to end
        replace(found, layer_by_layer=None),  # no model to tell what begins where
        replace(found, layer_by_layer={**begun, "c": CodeCount(1_000_000, 12, 1)}),
        replace(found, layer_by_layer={**begun, "b": CodeCount(1_000_000, 1, 2)}),
    ):
        with pytest.raises(RuntimeError, match="the first at 'b'"):
            worse.check()


class Upsampled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.interpolate(self.conv(x).relu(), scale_factor=2.0)


@pytest.mark.parametrize("runtime", ["onnxruntime", "openvino"])
def test_an_output_that_differs_behind_the_same_codes_is_named(runtime: str, tmp_path) -> None:
    if runtime == "openvino":
        pytest.importorskip("openvino")
    model = exact_net(Upsampled(), False)
    path = qt.export_onnx(model, X, tmp_path / "m.onnx").path
    assert verify(model, X, path, (runtime,)).check() == {runtime: qt.export.Verdict.EQUAL}
    proto = onnx.load(path)
    (resize,) = (node for node in proto.graph.node if node.op_type == "Resize")
    (mode,) = (attribute for attribute in resize.attribute if attribute.name == "nearest_mode")
    mode.s = b"ceil"
    onnx.save(proto, path)
    found = verify(model, X, path, (runtime,))
    assert found.runtimes[runtime].codes.differing == 0
    assert found.runtimes[runtime].verdict is qt.export.Verdict.DIFFERENT
    assert "of its largest value for identical inputs" in str(found)
    with pytest.raises(RuntimeError, match=r"verify: an output differs in .+ by .+% of its largest value"):
        found.check()


def test_the_cause_of_a_difference_is_named() -> None:
    codes, integer = {"a": CodeCount(1000, 900, 3)}, (ExecutedLayer("first", "QLinearConv", True),)
    found = qt.export.RuntimeCodes("runtime", codes, 0.0, integer, 0, (), 0.0, 1e-5, layer_by_layer=codes)
    with pytest.raises(RuntimeError, match=r"verify qtoolkit.convert\(prepared, arithmetic='integer'\)"):
        found.check()
    on_codes = replace(found, on_codes=("first",))
    with pytest.raises(RuntimeError, match="Weights and arithmetic are the same on both sides") as raised:
        on_codes.check()
    assert "arithmetic=" not in str(raised.value)
    in_float = replace(on_codes, layers=(ExecutedLayer("first", "FusedConv", False),))
    with pytest.raises(
        RuntimeError, match=r"in float that the model computes in integers \(first\): .*integer_weights=True"
    ):
        in_float.check()
    other = replace(in_float, weights={"first.weight_quantizer": CodeCount(8, 7, 90)})
    with pytest.raises(RuntimeError, match="differ from the model's at first.weight_quantizer"):
        other.check()


def test_differences_at_rounding_boundaries_are_rounding() -> None:
    ties = {"a": CodeCount(1000, 90, 1, ties=88)}
    found = qt.export.RuntimeCodes("runtime", ties, 0.0, (), 0, (), 0.0, 1e-5, layer_by_layer=ties)
    assert found.verdict is qt.export.Verdict.ROUNDING
    assert replace(found, layer_by_layer={"a": CodeCount(1000, 90, 1, ties=80)}).verdict is qt.export.Verdict.DIFFERENT
    assert "  verdict: rounding\n" in str(found)


def test_quantizers_that_were_merged_do_not_fail_a_comparison_of_the_others() -> None:
    found = qt.export.RuntimeCodes("runtime", {"a": CodeCount(1000)}, 0.0, (), 0, ("b",), 0.0, 0.0)
    with pytest.warns(
        UserWarning, match="does not return the quantized values of b: it merged their nodes with others"
    ):
        assert found.check() is qt.export.Verdict.EQUAL
    with pytest.raises(RuntimeError, match="does not return the quantized values of 'b': .* nothing was compared"):
        replace(found, by_quantizer={}).check()


def test_weights_and_integer_layers_are_found_in_the_model(tmp_path) -> None:
    torch.manual_seed(1)
    prepared = qt.prepare(Block().eval(), X, "onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    own, integer = qt.convert(prepared), qt.convert(prepared, arithmetic="integer")
    for weights in (True, False):
        path = qt.export_onnx(own, X, tmp_path / "m.onnx", integer_weights=weights, progress=False).path
        codes = verify(integer, X, path, progress=False).runtimes["onnxruntime"]
        assert {name: count.differing for name, count in codes.weights.items()} == dict.fromkeys(
            (f"{layer}.weight_quantizer" for layer in ("first", "second", "third", "fc")), 0
        )
        assert {"first", "second", "third"} <= set(codes.on_codes)
    assert verify(own, X, path, progress=False).runtimes["onnxruntime"].on_codes == ()
    with torch.no_grad():
        integer.get_submodule("second").weight.neg_()
    with pytest.raises(RuntimeError, match=r"differ from the model's at second\.weight_quantizer"):
        verify(integer, X, path, progress=False).check()


def test_files_that_are_not_of_the_model_are_refused(block, tmp_path) -> None:
    model, path = block
    (tmp_path / "text.onnx").write_text("no model")
    written = File()
    written.output(written.pair(written.input("x", *X.shape)))
    written.save(tmp_path, "other.onnx")
    other = exact_net(nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), nn.ReLU(), nn.Conv2d(4, 2, 1, bias=False)), False)
    for run in (verify, qt.export.verify_onnx):
        with pytest.raises(ValueError, match=r"text.onnx' is not an ONNX file, or is truncated"):
            run(model, X, tmp_path / "text.onnx")
        with pytest.raises(ValueError, match="no quantizer of the file has a name from the model.*compare_runtimes"):
            run(model, X, tmp_path / "other.onnx")
        with pytest.raises(
            ValueError, match=r"has a quantizer '.*', and the model does not .*: the file belongs to another"
        ):
            run(other, X, path)
        with pytest.raises(
            ValueError, match=r"input 'x' of the file is float32 of shape \(2, 3, 12, 12\), got float32 of"
        ):
            run(model, X[:, :, :11], path)
        with pytest.raises(ValueError, match=r"input 'x' of the file is float32 of shape .*, got float64 of shape"):
            run(model, X.double(), path)


class Samples(nn.Module):
    """Draws random numbers between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        return self.second(y + torch.randn_like(y))


@pytest.mark.parametrize("arithmetic", ["float", "integer"])
def test_what_follows_random_numbers_is_compared_from_the_runtimes_codes(arithmetic: str, tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(16, 8)
    prepared = qt.prepare(Samples().eval(), x, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    path = qt.export_onnx(prepared, x, tmp_path / "model.onnx", exporter="torchscript", progress=False).path
    found = qt.export.verify(qt.convert(prepared, arithmetic=arithmetic), x, path, progress=False).runtimes[
        "onnxruntime"
    ]
    assert found.not_compared == ("activation_quantizers.randn_like",)
    assert set(found.by_quantizer) == {f"activation_quantizers.{name}" for name in ("x", "first", "add")}
    assert found.codes.compared == 3 * 128
    assert found.codes.differing == 0
    with pytest.warns(UserWarning, match="randn_like: .* or they depend on random numbers"):
        found.check()
