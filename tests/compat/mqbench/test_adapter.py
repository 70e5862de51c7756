"""qtoolkit.compat.mqbench: every option does what it says, also where MQBench's own does not; unknown ones are errors."""

import onnx
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.compat.mqbench.convert_deploy import convert_deploy
from qtoolkit.compat.mqbench.platforms import PLATFORMS
from qtoolkit.compat.mqbench.prepare_by_platform import BackendType, prepare_by_platform, prepare_qat_fx_by_platform
from qtoolkit.compat.mqbench.scheme import FAKE_QUANTIZERS, OBSERVERS, QuantizeScheme
from qtoolkit.compat.mqbench.utils import state
from qtoolkit.nn import LinkedBatchNorm, QuantWeighted
from tests import processes

SHAPE = (2, 3, 8, 8)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.head = nn.Sequential(nn.Conv2d(8, 4, 3), nn.Hardswish())
        self.classes = 4

    def forward(self, x: Tensor, scaled: bool = False) -> Tensor:
        y = self.head(self.body(x))
        return y * 2 if scaled else y

    def names(self) -> list[int]:
        return list(range(self.classes))


def prepared_with(backend: BackendType = BackendType.Tensorrt, model: nn.Module | None = None, **config):
    return prepare_by_platform(Net() if model is None else model, backend, config)


def specs(prepared: nn.Module) -> tuple[qt.QuantSpec, qt.QuantSpec]:
    """The specs of the body's weight and of the graph's input."""
    quantizers = qt.quantizers_of(prepared)
    return quantizers["body.0.weight_quantizer"].spec, quantizers["activation_quantizers.x"].spec


def layers(prepared: nn.Module) -> set[str]:
    return {name for name, module in prepared.named_modules() if isinstance(module, QuantWeighted)}


def calibrated(prepared: nn.Module) -> nn.Module:
    state.enable_calibration(prepared)
    prepared(torch.randn(SHAPE))
    state.enable_quantization(prepared)
    return prepared


# ---- backends and schemes

TENSORRT = ("int8 narrow per-channel(0) lsq", "int8 narrow lsq")
DESCRIBED = {
    "Tensorrt": TENSORRT,
    "Tensorrt_NLP": TENSORRT,
    "QDQ": TENSORRT,
    "OPENVINO": ("int7 per-channel(0) lsq", "int8 lsq"),
    "SNPE": ("uint8 affine lsq+", "uint8 affine lsq+"),
    "PPLW8A16": ("uint8 affine lsq+", "uint16 affine lsq+"),
    "PPLCUDA": ("uint8 affine per-channel(0) lsq+", "uint8 affine lsq+"),
    "ONNX_QNN": ("uint8 affine lsq+", "uint8 affine lsq+"),
    "Tengine_u8": ("uint8 affine lsq+", "uint8 affine lsq+"),
    "STPU": ("int8 narrow", "int8 narrow"),
    "Vitis": ("int8 pow2 tqt", "int8 pow2 tqt"),
    "NNIE": ("nnie", "nnie"),
}


def test_backends_have_their_schemes() -> None:
    from qtoolkit.compat.mqbench.platforms import backend_of, platform_of, qconfig_of

    for name, described in DESCRIBED.items():
        platform = platform_of(name)
        qconfig = qconfig_of(platform, backend_of(platform, academic_mode=False), {})
        assert (qconfig.weight.describe(), qconfig.activation.describe()) == described, name
    assert PLATFORMS.keys() == {*DESCRIBED, "Academic", "Academic_NLP"} == {backend.name for backend in BackendType}


def test_academic_backends_need_every_entry() -> None:
    with pytest.raises(
        ValueError, match="must have w_observer, w_fakequantize, .*, a_qscheme: the backend 'academic' has no"
    ):
        prepared_with(BackendType.Academic)


def test_a_scheme_is_the_grid() -> None:
    extra = {
        "w_qscheme": {"bit": 4, "symmetry": True, "per_channel": True, "pot_scale": True, "symmetric_range": True},
        "a_qscheme": {"bit": 6, "symmetry": False, "per_channel": False, "pot_scale": False, "ema_ratio": 0.95},
        "w_fakequantize": "FixedFakeQuantize",
        "a_fakequantize": "FixedFakeQuantize",
    }
    weight, activation = specs(prepared_with(extra_qconfig_dict=extra))
    assert (weight.qmin, weight.qmax, weight.axis, weight.pow2_scale) == (-7, 7, 0, True)
    assert (activation.qmin, activation.qmax, activation.axis) == (0, 63, None)
    assert activation.observer_args == {"momentum": 0.05}


def test_options_of_an_observer_hold_for_one_model() -> None:
    changed = specs(prepared_with(extra_qconfig_dict={"a_observer_extra_args": {"ema_ratio": 0.5}}))[1]
    default = specs(prepared_with())[1]
    assert changed.observer_args == {"momentum": 0.5}
    assert qt.QuantSpec(observer=default.observer, observer_args=default.observer_args) == qt.QuantSpec(
        observer="moving_average"
    )


@pytest.mark.parametrize("observer", OBSERVERS)
def test_every_observer_fits_a_grid(observer: str) -> None:
    scheme = {"pot_scale": "Floor" in observer or "PoT" in observer}
    extra = {"w_observer": observer, "a_observer": observer, "w_qscheme": scheme, "a_qscheme": scheme}
    extra |= {"w_fakequantize": "FixedFakeQuantize", "a_fakequantize": "FixedFakeQuantize"}
    prepared = calibrated(prepared_with(extra_qconfig_dict=extra))
    assert {q.spec.observer for q in qt.quantizers_of(prepared).values()} == {OBSERVERS[observer].name}


def test_every_fake_quantizer_has_a_quantizer() -> None:
    for name, row in FAKE_QUANTIZERS.items():
        scheme = {"bit": 4, "pot_scale": name == "TqtFakeQuantize"}
        backend = BackendType.NNIE if name == "NNIEFakeQuantize" else BackendType.Tensorrt
        extra = {"w_fakequantize": name}
        extra |= {} if backend is BackendType.NNIE else {"w_qscheme": scheme}
        assert specs(prepared_with(backend, extra_qconfig_dict=extra))[0].quantizer == row.name


def test_options_of_a_fake_quantizer() -> None:
    extra = {"w_fakequantize": "DSQFakeQuantize", "w_fakeq_params": {"alpha": 0.3}}
    assert specs(prepared_with(extra_qconfig_dict=extra))[0].quantizer_args == {"alpha": 0.3}
    with_zero_point = {"a_fakequantize": "PACTFakeQuantize", "a_qscheme": {"symmetry": False}}
    assert specs(prepared_with(extra_qconfig_dict=with_zero_point))[1].quantizer == "learned_range"


def test_openvino_has_weights_of_7_bits_but_in_academic_mode() -> None:
    scheme = {"w_qscheme": {"bit": 8, "per_channel": True}}
    assert specs(prepared_with(BackendType.OPENVINO, extra_qconfig_dict=scheme))[0].bits == 7
    academic = {"academic_mode": True}
    prepared = prepared_with(BackendType.OPENVINO, extra_qconfig_dict=scheme, extra_quantizer_dict=academic)
    assert specs(prepared)[0].bits == 8
    assert prepared.plan.backend.roles == qt.backends["academic"].roles


# ---- what is quantized


def test_exclusions_reach_nested_modules() -> None:
    assert layers(prepared_with(extra_quantizer_dict={"exclude_module_name": ["head.0"]})) == {"body.0"}
    with pytest.raises(ValueError, match=r"head\.9"):
        prepared_with(extra_quantizer_dict={"exclude_module_name": ["head.9"]})


def test_nodes_and_functions_are_added_and_excluded() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.InstanceNorm2d(3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(self.norm(torch.add(self.conv(x), x)), 1)

    def kept(**options) -> set[str]:
        prepared = prepared_with(model=Sum(), extra_quantizer_dict=options)
        return {name.rpartition(".")[2] for name in qt.quantizers_of(prepared) if "activation" in name}

    usual = kept()
    assert kept(exclude_function_type=[torch.add], exclude_module_name=["conv"]) == set()
    assert kept(exclude_node_name=["add"], exclude_module_name=["conv"]) == set()
    assert usual < kept(additional_module_type=(nn.InstanceNorm2d,))
    assert usual < kept(additional_function_type=[torch.softmax])
    assert usual < kept(additional_node_name=["softmax"])


def test_nodes_of_nested_modules_have_the_names_of_torch_fx() -> None:
    """MQBench's scripts read them from the code of the graph: body_0, and _0 in an nn.Sequential."""
    assert layers(prepared_with(extra_quantizer_dict={"exclude_node_name": ["head_0"]})) == {"body.0"}
    chain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
    for node, left in (("_0", {"1.0"}), ("_1_0", {"0"})):
        assert layers(prepared_with(model=chain, extra_quantizer_dict={"exclude_node_name": [node]})) == left
    with pytest.raises(ValueError, match="unknown layer 'head_9'"):
        prepared_with(extra_quantizer_dict={"exclude_node_name": ["head_9"]})


def test_leaf_modules_concrete_arguments_and_attributes() -> None:
    class Branches(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    model = Net()
    model.head.add_module("branches", Branches())
    prepared = prepared_with(
        model=model,
        leaf_module=[Branches],
        concrete_args={"scaled": True},
        preserve_attr={"": ["names", "classes"], "head": ["training"]},
    )
    assert prepared.names() == [0, 1, 2, 3]
    assert prepared.classes == 4
    assert "mul" in {node.name for node in prepared.graph.nodes}


def test_fusers_of_torch_are_applied() -> None:
    class Scaled(nn.Sequential):
        pass

    def fuse(is_qat: bool, conv: nn.Module, act: nn.Module) -> nn.Module:
        assert is_qat
        return Scaled(conv, act)

    methods = {(nn.Conv2d, nn.Hardswish): fuse}
    prepared = prepared_with(extra_fuse_dict={"additional_fuser_method_mapping": methods})
    assert any(isinstance(module, Scaled) for module in prepared.modules())
    both = {
        "additional_fuser_method_mapping": methods,
        "additional_fusion_pattern": {(nn.Hardswish, nn.Conv2d): object},
    }
    assert prepared_with(extra_fuse_dict=both).graph is not None
    with pytest.raises(ValueError, match="additional_fusion_pattern: .* has no fuser"):
        prepared_with(extra_fuse_dict={"additional_fusion_pattern": {(nn.Hardswish, nn.Conv2d): object}})


def test_qat_modules_are_merged() -> None:
    class Own(qt.nn.QuantConv2d):
        pass

    prepared = prepared_with(extra_fuse_dict={"additional_qat_module_mapping": {nn.Conv2d: Own}})
    assert isinstance(prepared.get_submodule("head.0"), Own)


# ---- the model


def test_the_model_is_not_changed_and_weights_stay_tied() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(self.conv(x))

    model = Tied()
    before = list(vars(model))
    prepared = prepared_with(model=model)
    assert list(vars(model)) == before
    assert len(list(prepared.get_submodule("conv").parameters(recurse=False))) == 2
    assert prepared.get_submodule("conv").weight is not model.conv.weight


@pytest.mark.parametrize("training", [True, False])
def test_batch_norms_are_frozen_or_folded(training: bool) -> None:
    def linked(prepared: nn.Module) -> list[bool]:
        return [module.frozen for module in prepared.modules() if isinstance(module, LinkedBatchNorm)]

    model = Net().train(training)
    assert linked(prepare_by_platform(model, BackendType.Tensorrt)) == ([True] if training else [])
    assert linked(prepare_by_platform(model, "Tensorrt", freeze_bn=False)) == ([False] if training else [])
    assert linked(prepare_by_platform(model, BackendType.Tensorrt, is_qat=False)) == []
    assert linked(prepare_qat_fx_by_platform(model, BackendType.Tensorrt)) == ([False] if training else [])
    assert model.training == training


# ---- switches


def modes(prepared: nn.Module) -> set[tuple[bool, bool, bool]]:
    """Of each quantizer: of a weight, observing, quantizing."""
    return {(q.of_weight, q.observing, q.quantizing) for q in qt.quantizers_of(prepared).values()}


def test_the_switches() -> None:
    prepared = calibrated(prepared_with())
    assert modes(prepared) == {(False, False, True), (True, False, True)}
    state.enable_calibration(prepared)
    assert modes(prepared) == {(False, True, False), (True, True, False)}
    prepared(torch.randn(SHAPE))
    state.enable_quantization(prepared, weight_cali_on=True)
    assert modes(prepared) == {(False, False, True), (True, True, True)}
    state.enable_quantization(prepared, act_cali_on=True)
    assert modes(prepared) == {(False, True, True), (True, False, True)}
    state.enable_calibration_woquantization(prepared, "act_fake_quant")
    assert modes(prepared) == {(False, True, False), (True, False, False)}
    state.enable_calibration_quantization(prepared, "weight_fake_quant")
    assert modes(prepared) == {(False, False, False), (True, True, True)}
    state.enable_all(prepared)
    assert modes(prepared) == {(False, True, True), (True, True, True)}
    state.disable_all(prepared)
    assert modes(prepared) == {(False, False, False), (True, False, False)}
    with pytest.raises(ValueError, match="got 'bias', which matches none of the model's 4 quantizers"):
        state.enable_calibration_woquantization(prepared, "bias")


def test_calibration_in_two_phases() -> None:
    prepared = prepared_with()
    state.enable_calibration_quantization(prepared, "weight_fake_quant")
    prepared(torch.randn(SHAPE))
    state.enable_calibration_woquantization(prepared, "act_fake_quant")
    prepared(torch.randn(SHAPE))
    state.enable_quantization(prepared)
    assert torch.isfinite(prepared(torch.randn(SHAPE))).all()


def test_a_layer_that_no_batch_reaches_has_a_weight_range() -> None:
    prepared = prepared_with()
    state.enable_calibration(prepared)
    state.enable_quantization(prepared)
    quantizers = qt.quantizers_of(prepared)
    assert {name for name, quantizer in quantizers.items() if quantizer.ready} == {
        name for name, quantizer in quantizers.items() if quantizer.of_weight
    }


# ---- deployment


@pytest.mark.slow
def test_names_sizes_and_opset_are_honoured(tmp_path) -> None:
    prepared = calibrated(prepared_with(BackendType.SNPE)).eval()
    convert_deploy(
        prepared,
        BackendType.SNPE,
        dummy_input=torch.randn(SHAPE),
        output_path=tmp_path,
        model_name="net",
        input_names=["image"],
        output_names=["y"],
        dynamic_axes={"image": {0: "batch"}},
        opset_version=17,
    )
    for name in ("net.onnx", "net_deploy_model.onnx"):
        model = onnx.load(tmp_path / name)
        assert [value.name for value in (*model.graph.input, *model.graph.output)] == ["image", "y"]
        assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param == "batch"
        assert model.opset_import[0].version == 17


WRONG = {
    "backend": (
        lambda p: convert_deploy(p, BackendType.NNIE, {"x": SHAPE}),
        "prepared for 'tensorrt10', got a backend_type",
    ),
    "qlinear": (lambda p: convert_deploy(p, "Tensorrt", {"x": SHAPE}, deploy_to_qlinear=True), "must be False"),
    "inputs": (lambda p: convert_deploy(p, "Tensorrt"), "either input_shape_dict or dummy_input"),
    "axes": (lambda p: convert_deploy(p, "Tensorrt", {"x": SHAPE}, dynamic_axes={"x": {2: "h"}}), "only axis 0"),
    "option": (lambda p: convert_deploy(p, "Tensorrt", {"x": SHAPE}, verbose=True), "unknown option of convert_deploy"),
    "name": (lambda _: prepare_by_platform(Net(), "tensort"), "unknown backend 'tensort'; did you mean 'Tensorrt'"),
    "key": (lambda _: prepared_with(extra_qconfg_dict={}), "did you mean 'extra_qconfig_dict'"),
    "quantizer key": (lambda _: prepared_with(extra_quantizer_dict={"exclude": []}), "key of extra_quantizer_dict"),
    "fuse key": (lambda _: prepared_with(extra_fuse_dict={"fuse": {}}), "key of extra_fuse_dict"),
    "qconfig key": (lambda _: prepared_with(extra_qconfig_dict={"w_bits": 4}), "key of extra_qconfig_dict"),
    "observer": (lambda _: prepared_with(extra_qconfig_dict={"w_observer": "KL"}), "unknown observer 'KL'"),
    "fake quantizer": (lambda _: prepared_with(extra_qconfig_dict={"w_fakequantize": "LSQ"}), "unknown fake quantizer"),
    "observer option": (
        lambda _: prepared_with(extra_qconfig_dict={"w_observer_extra_args": {"bin": 1}}),
        "option of MinMaxObserver",
    ),
    "power": (
        lambda _: prepared_with(extra_qconfig_dict={"w_observer": "MSEObserver", "w_observer_extra_args": {"p": 3.0}}),
        "must be 2.0, got 3.0",
    ),
    "dorefa": (
        lambda _: prepared_with(extra_qconfig_dict={"w_fakequantize": "DoReFaFakeQuantize"}),
        "supports at most 7 bits, got 8",
    ),
    "nnie": (
        lambda _: prepared_with(BackendType.NNIE, extra_qconfig_dict={"w_fakequantize": "FixedFakeQuantize"}),
        "does not fit the backend 'nnie'",
    ),
    "nnie scheme": (
        lambda _: prepared_with(BackendType.NNIE, extra_qconfig_dict={"a_qscheme": {"bit": 8}}),
        "a_qscheme must be omitted for the backend 'nnie'",
    ),
    "tracer": (lambda _: prepare_by_platform(Net(), "Tensorrt", custom_tracer=object()), "custom_tracer must be None"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_has_no_equivalent_is_an_error(case: str) -> None:
    call, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        call(prepared_with())


def test_a_float_model_is_refused() -> None:
    with pytest.raises(TypeError, match="convert_deploy: the model must be what qtoolkit.prepare"):
        convert_deploy(Net(), "Tensorrt", {"x": SHAPE})


def test_a_scheme_may_be_an_object() -> None:
    weight, _ = specs(prepared_with(extra_qconfig_dict={"w_qscheme": QuantizeScheme(bit=4)}))
    assert weight.bits == 4


@pytest.mark.slow
def test_imports_of_mqbench_after_install() -> None:
    program = (
        "from qtoolkit.compat import mqbench; mqbench.install()\n"
        "from mqbench.prepare_by_platform import prepare_by_platform, BackendType\n"
        "from mqbench.convert_deploy import convert_deploy, convert_merge_bn\n"
        "from mqbench.utils.state import enable_calibration, enable_quantization\n"
        "from mqbench.utils.logger import logger\n"
        "print(convert_deploy.__module__)"
    )
    assert processes.python("-c", program).stdout.strip() == "qtoolkit.compat.mqbench.convert_deploy"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (
            "from mqbench.advanced_ptq import ptq_reconstruction",
            "'ptq_reconstruction' is missing: use qtoolkit.tuning.reconstruct(",
        ),
        ("from mqbench.utils.registry import register_model_quantizer", "pass qat_modules and fuse_patterns"),
        ("from mqbench.fake_quantize import LearnableFakeQuantize", "qtoolkit.QuantSpec(quantizer=...)"),
        (
            "import mqbench.advanced_ptq as ptq; ptq.ptq_reconstruction",
            "ImportError: mqbench.advanced_ptq has no adapter here",
        ),
    ],
)
def test_what_has_no_adapter_names_the_way_here(line: str, words: str) -> None:
    program = f"from qtoolkit.compat import mqbench; mqbench.install()\n{line}"
    found = processes.python("-c", program)
    assert found.returncode == 1
    assert words in found.stderr.splitlines()[-1]
