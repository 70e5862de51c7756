"""compat.pytorch_quantization's layers, mixins, replacement of torch.nn's names, and install."""

import copy
import importlib
import pickle
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from qtoolkit.compat.pytorch_quantization import deactivate, initialize, quant_modules
from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization import tensor_quant as tq
from qtoolkit.compat.pytorch_quantization.nn.modules import _utils
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from tests import processes, reference

OURS = "qtoolkit.compat.pytorch_quantization"
WEIGHTED = {
    f"{kind}{d}d": (getattr(F, f"{function}{d}d"), (4, 6, 3), (2, 4, *[7] * d), kind == "ConvTranspose")
    for kind, function in (("Conv", "conv"), ("ConvTranspose", "conv_transpose"))
    for d in (1, 2, 3)
}
INPUTS = {
    **{f"{kind}Pool{d}d": (2,) for kind in ("Max", "Avg", "AdaptiveAvg") for d in (1, 2, 3)},
    **{f"InstanceNorm{d}d": (4,) for d in (1, 2, 3)},
}
SPECS = {
    "default": None,
    "tensor": QuantDescriptor(),
    "4 bits, narrow": QuantDescriptor(num_bits=4, narrow_range=True),
}


def data(shape, seed=0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_own_range(x: torch.Tensor, kept: int | None = None, desc: QuantDescriptor = SPECS["tensor"]) -> torch.Tensor:
    """The oracle's values of x, by its own largest magnitudes."""
    amax = x.abs().max() if kept is None else x.abs().amax([d for d in range(x.dim()) if d != kept], keepdim=True)
    return reference.tensor_quant(x.detach(), amax.detach(), desc.num_bits, desc.unsigned, desc.narrow_range)[2]


# ---- layers


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", WEIGHTED)
def test_convolutions_quantize_input_and_weight(name, bias, spec):
    function, sizes, shape, transposed = WEIGHTED[name]
    descs = {} if spec is None else {"quant_desc_input": spec, "quant_desc_weight": spec}
    layer = getattr(quant_nn, f"Quant{name}")(*sizes, stride=2, padding=1, bias=bias, **descs)
    x = data(shape)
    weight = by_own_range(layer.weight, int(transposed)) if spec is None else by_own_range(layer.weight, None, spec)
    wanted = function(by_own_range(x, None, spec or SPECS["tensor"]), weight, layer.bias, 2, 1)
    assert torch.equal(layer(x), wanted)


def test_linear_quantizes_input_and_weight():
    layer = quant_nn.QuantLinear(5, 3)
    x = data((4, 5))
    assert torch.equal(layer(x), F.linear(by_own_range(x), by_own_range(layer.weight, 0), layer.bias))
    layer.weight_quantizer.enable_calib()
    layer(x)
    layer.weight_quantizer.load_calib_amax()
    assert torch.equal(layer.weight_quantizer.amax, layer.weight.detach().abs().amax(1, keepdim=True))


@pytest.mark.parametrize("name", INPUTS)
def test_layers_without_weights_quantize_their_input(name):
    x = data((2, 4, *[6] * int(name[-2])))
    layer = getattr(quant_nn, f"Quant{name}")(*INPUTS[name], quant_desc_input=SPECS["4 bits, narrow"])
    wanted = getattr(torch.nn, name)(*INPUTS[name])(by_own_range(x, None, SPECS["4 bits, narrow"]))
    assert torch.equal(layer(x), wanted)
    assert isinstance(layer, getattr(torch.nn, name))


@pytest.mark.parametrize("name", [*WEIGHTED, *INPUTS, "Linear", "LSTM", "LSTMCell"])
def test_names_without_the_prefix_are_the_same_classes(name):
    assert getattr(quant_nn, name) is getattr(quant_nn, f"Quant{name}")
    assert {name, f"Quant{name}"} <= set(quant_nn.__all__)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "replicate", "circular"])
@pytest.mark.parametrize("padding", [1, "same", "valid"])
def test_all_padding_modes(mode, padding):
    layer = quant_nn.QuantConv2d(3, 4, 3, padding=padding, padding_mode=mode)
    plain = torch.nn.Conv2d(3, 4, 3, padding=padding, padding_mode=mode)
    with torch.no_grad():
        plain.weight.copy_(by_own_range(layer.weight, 0))
        plain.bias.copy_(layer.bias)
    x = data((2, 3, 8, 9))
    assert torch.equal(layer(x), plain(by_own_range(x)))


def test_transposed_convolutions_take_an_output_size_with_dilation_and_groups():
    layer = quant_nn.QuantConvTranspose2d(4, 6, 3, stride=2, dilation=2, groups=2)
    x = data((1, 4, 5, 5))
    wanted = F.conv_transpose2d(by_own_range(x), by_own_range(layer.weight, 1), layer.bias, 2, 0, 1, 2, 2)
    assert torch.equal(layer(x, output_size=[14, 14]), wanted)
    layer.weight_quantizer.enable_calib()
    layer(x)
    layer.weight_quantizer.load_calib_amax()
    assert layer.weight_quantizer.amax.shape == (1, 3, 1, 1)
    with pytest.raises(ValueError, match="zeros"):
        quant_nn.QuantConvTranspose2d(4, 6, 3, padding_mode="reflect")


def test_device_and_dtype_arguments():
    layer = quant_nn.QuantConv2d(3, 4, 3, device="meta", dtype=torch.float64)
    assert (layer.weight.device.type, layer.weight.dtype) == ("meta", torch.float64)
    half = quant_nn.QuantLinear(3, 4, dtype=torch.bfloat16)
    assert half(data((2, 3)).bfloat16()).dtype == torch.bfloat16


def test_gradients_pass_to_what_is_inside_the_ranges():
    layer = quant_nn.QuantLinear(3, 1, bias=False)
    layer.input_quantizer.amax = 1.0
    x = torch.tensor([[0.5, 2.0, -1.0]], requires_grad=True)
    layer(x).sum().backward()
    assert torch.equal(x.grad, by_own_range(layer.weight, 0) * torch.tensor([1.0, 0.0, 1.0]))
    assert torch.equal(layer.weight.grad, reference.tensor_quant(x.detach(), torch.tensor(1.0), 8, False, False)[2])


def test_without_quantizers_layers_compute_what_torchs_do():
    layer = quant_nn.QuantConv2d(3, 4, 3)
    layer.input_quantizer.disable()
    layer.weight_quantizer.disable()
    x = data((1, 3, 5, 5))
    assert torch.equal(layer(x), F.conv2d(x, layer.weight, layer.bias))
    assert list(layer.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize("make", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_compute_the_same(make):
    layer = quant_nn.QuantConv2d(3, 4, 3)
    layer.input_quantizer.amax = 1.0
    assert torch.equal(make(layer)(data((1, 3, 5, 5))), layer(data((1, 3, 5, 5))))


@pytest.mark.slow
@pytest.mark.parametrize("calibrated", [True, False])
def test_models_compile_whole_and_export(calibrated):
    model = torch.nn.Sequential(
        quant_nn.Conv2d(3, 4, 3), quant_nn.AvgPool2d(2), quant_nn.ConvTranspose2d(4, 4, 2)
    ).eval()
    x = data((2, 3, 6, 6))
    if calibrated:
        for module in model:
            module.input_quantizer.amax = 1.5
    wanted = model(x)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="aot_eager")(x), wanted)
    assert torch.equal(torch.export.export(model, (x,)).module()(x), wanted)


def test_autocast_runs_layers_in_its_dtype():
    layer = quant_nn.Conv2d(3, 4, 3)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(data((1, 3, 5, 5)))
    x, weight = by_own_range(data((1, 3, 5, 5))), by_own_range(layer.weight, 0)
    assert torch.equal(y, F.conv2d(x.bfloat16(), weight.bfloat16(), layer.bias.bfloat16()))


def test_scripts_make_layers_without_init():
    plain = torch.nn.Conv2d(3, 4, 3, padding_mode="reflect", padding=1)
    layer = quant_nn.QuantConv2d.__new__(quant_nn.QuantConv2d)
    for name, value in vars(plain).items():
        setattr(layer, name, value)

    def __init__(self):  # noqa: N807  # as scripts name it: quantizers are made in functions of this name
        self.init_quantizer(*_utils.pop_quant_desc_in_kwargs(self.__class__))

    __init__(layer)
    x = F.pad(by_own_range(data((1, 3, 5, 5))), [1] * 4, mode="reflect")
    assert torch.equal(layer(data((1, 3, 5, 5))), F.conv2d(x, by_own_range(plain.weight, 0), plain.bias))
    assert layer.weight is plain.weight


# ---- mixins


@pytest.fixture
def linear():
    """A class of its own, as defaults are set on classes."""
    return type("Mine", (quant_nn.QuantLinear,), {})


def test_defaults_are_set_per_class(linear):
    desc = QuantDescriptor(num_bits=4)
    linear.set_default_quant_desc_input(desc)
    linear.set_default_quant_desc_weight(QuantDescriptor(num_bits=5))
    layer = linear(3, 4)
    assert (layer.input_quantizer.num_bits, layer.weight_quantizer.num_bits) == (4, 5)
    assert linear.default_quant_desc_input == desc
    assert linear.default_quant_desc_input is not desc
    assert quant_nn.QuantLinear(3, 4).input_quantizer.num_bits == 8
    for setter in (linear.set_default_quant_desc_input, linear.set_default_quant_desc_weight):
        with pytest.raises(ValueError, match="is not an instance of QuantDescriptor, got an int"):
            setter(8)
    pool = type("Pool", (quant_nn.QuantMaxPool2d,), {})
    pool.set_default_quant_desc_input(desc)
    assert pool(2).input_quantizer.num_bits == 4
    assert quant_nn.QuantMaxPool2d(2).input_quantizer.num_bits == 8


def test_init_quantizer_belongs_into_init():
    layer = quant_nn.QuantLinear(3, 4)
    with pytest.raises(TypeError, match="only called by __init__ of quantized module, not in test_init_quantizer"):
        layer.init_quantizer(QuantDescriptor(), QuantDescriptor())
    with pytest.raises(TypeError, match="only called by __init__ of quantized module"):
        quant_nn.QuantMaxPool2d(2).init_quantizer(QuantDescriptor())


def test_lists_of_quantizers():
    class Cells(torch.nn.Module, _utils.QuantMixin):
        def __init__(self):
            super().__init__()
            self.init_quantizer(QuantDescriptor(num_bits=4), QuantDescriptor(axis=0), num_layers=3)

    cells = Cells()
    assert [q.num_bits for q in cells._input_quantizers] == [4, 4, 4]
    assert [q.axis for q in cells._weight_quantizers] == [0, 0, 0]


@pytest.mark.parametrize("make", [lambda **k: quant_nn.QuantLinear(3, 4, **k), lambda **k: quant_nn.MaxPool2d(2, **k)])
def test_layer_argument_errors(make):
    with pytest.raises(TypeError, match="Unused keys: quant_desc_output"):
        make(quant_desc_output=QuantDescriptor())
    for unknown in ("colour", "weight_spec"):
        with pytest.raises(TypeError, match=f"Unused keys: {unknown}. Besides the arguments of torch's layer"):
            make(**{unknown: None})
    with pytest.raises(ValueError, match="Only fake quantization is supported!"):
        make(quant_desc_input=QuantDescriptor(fake_quant=False))


# ---- names of torch.nn


@pytest.fixture(autouse=True)
def _names_of_torch():
    """Leave torch.nn as it was."""
    yield
    deactivate()
    assert not quant_modules._quant_module_helper_object.originals


NAMES = [entry.mod_name for entry in quant_modules._DEFAULT_QUANT_MAP]


def test_the_table():
    pools = [f"{kind}Pool{d}d" for kind in ("Avg", "AdaptiveAvg") for d in (1, 2, 3)]
    assert sorted(NAMES) == sorted([*WEIGHTED, "Linear", "LSTM", "LSTMCell", *pools])
    for orig_mod, mod_name, replace_mod in quant_modules._DEFAULT_QUANT_MAP:
        assert orig_mod is torch.nn
        assert replace_mod is getattr(quant_nn, f"Quant{mod_name}")


@pytest.mark.parametrize("name", NAMES)
def test_each_name_stands_for_its_quantized_layer(name):
    original = getattr(torch.nn, name)
    initialize()
    assert getattr(torch.nn, name) is getattr(quant_nn, f"Quant{name}")
    deactivate()
    assert getattr(torch.nn, name) is original


def test_models_built_while_it_is_active_are_quantized():
    initialize(float_module_list=["Linear"])
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 4, 3, quant_desc_input=QuantDescriptor(num_bits=4)), torch.nn.Linear(2, 2)
    )
    deactivate()
    assert type(model[0]) is quant_nn.QuantConv2d
    assert model[0].input_quantizer.num_bits == 4
    assert type(model[1]) is torch.nn.Linear
    assert type(torch.nn.Conv2d(3, 4, 3)).__module__ == "torch.nn.modules.conv"


def test_initialize_again_takes_the_new_arguments_alone():
    float_linear, float_conv = torch.nn.Linear, torch.nn.Conv2d
    initialize()
    initialize(float_module_list=["Linear"])
    assert torch.nn.Linear is float_linear
    initialize(float_module_list=["Conv2d"])
    assert torch.nn.Linear is quant_nn.QuantLinear
    assert torch.nn.Conv2d is float_conv
    deactivate()
    deactivate()
    assert (torch.nn.Linear, torch.nn.Conv2d) == (float_linear, float_conv)


def test_custom_classes():
    mine = SimpleNamespace(Layer=torch.nn.ReLU)
    replaced = type("QuantLayer", (torch.nn.ReLU,), {})
    other = type("OtherLinear", (quant_nn.QuantLinear,), {})
    initialize(custom_quant_modules=[(mine, "Layer", replaced), (torch.nn, "Linear", other)])
    assert (mine.Layer, torch.nn.Linear) == (replaced, other)
    initialize()
    assert (mine.Layer, torch.nn.Linear) == (torch.nn.ReLU, quant_nn.QuantLinear)


def test_custom_quant_modules_win_over_float_module_list():
    initialize(float_module_list=["Linear"], custom_quant_modules=[(torch.nn, "Linear", quant_nn.QuantLinear)])
    assert torch.nn.Linear is quant_nn.QuantLinear


def test_a_name_that_is_not_in_the_table_is_warned_of():
    with pytest.warns(UserWarning, match="unknown float module 'Conv2D'; did you mean 'Conv2d'"):
        initialize(float_module_list=["Conv2D"])


def test_the_helper_works_as_scripts_use_it():
    helper = quant_modules.QuantModuleReplacementHelper()
    helper.prepare_state(float_module_list=["Conv1d"])
    original = torch.nn.Conv1d
    helper.apply_quant_modules()
    try:
        assert torch.nn.Conv1d is original
        assert type(torch.nn.Linear(2, 2)) is quant_nn.QuantLinear
    finally:
        helper.restore_float_modules()
    assert type(torch.nn.Linear(2, 2)).__module__ == "torch.nn.modules.linear"


# ---- import names

PATHS = [
    "calib",
    "calib.calibrator",
    "calib.histogram",
    "calib.max",
    "cuda_ext",
    "nn",
    "nn.functional",
    "nn.modules",
    "nn.modules._utils",
    "nn.modules.clip",
    "nn.modules.quant_conv",
    "nn.modules.quant_instancenorm",
    "nn.modules.quant_linear",
    "nn.modules.quant_pooling",
    "nn.modules.quant_rnn",
    "nn.modules.tensor_quantizer",
    "optim",
    "optim.helper",
    "quant_modules",
    "tensor_quant",
    "utils",
    "utils.quant_logging",
]


@pytest.mark.parametrize("path", PATHS)
def test_submodules_have_pytorch_quantizations_names(path):
    module = importlib.import_module(f"{OURS}.{path}")
    found = importlib.import_module(OURS)
    for part in path.split("."):
        found = getattr(found, part)
    assert found is module


MODULES = {
    "quant_conv": [name for name in WEIGHTED if "Conv" in name],
    "quant_instancenorm": ["InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d"],
    "quant_linear": ["Linear"],
    "quant_pooling": [name for name in INPUTS if "Pool" in name],
    "quant_rnn": ["LSTM", "LSTMCell"],
}


@pytest.mark.parametrize("path", MODULES)
def test_modules_have_the_names_without_the_prefix(path):
    module = importlib.import_module(f"{OURS}.nn.modules.{path}")
    for name in MODULES[path]:
        assert getattr(module, name) is getattr(module, f"Quant{name}") is getattr(quant_nn, name)


def test_convolutions_have_the_old_base_classes():
    quant_conv = importlib.import_module(f"{OURS}.nn.modules.quant_conv")
    assert isinstance(quant_nn.Conv2d(3, 4, 3), quant_conv._QuantConvNd)
    assert isinstance(quant_nn.ConvTranspose1d(3, 4, 3), quant_conv._QuantConvTransposeNd)
    assert not issubclass(quant_nn.ConvTranspose1d, quant_conv._QuantConvNd)


def test_a_script_derives_a_layer_from_the_base_of_convolutions():
    quant_conv = importlib.import_module(f"{OURS}.nn.modules.quant_conv")

    class Pointwise(quant_conv._QuantConvNd):
        def __init__(self, channels, outputs, **kwargs):
            descs = _utils.pop_quant_desc_in_kwargs(type(self), **kwargs)
            descs = dict(zip(("quant_desc_input", "quant_desc_weight"), descs, strict=True))
            geometry = [(1, 1), (1, 1), (0, 0), (1, 1), False, (0, 0), 1, False, "zeros"]
            super().__init__(channels, outputs, *geometry, **descs)

        def forward(self, x):
            return F.conv2d(*self._quant(x))

    layer, x = Pointwise(3, 4, quant_desc_input=QuantDescriptor(num_bits=4)), data((1, 3, 2, 2))
    wanted = F.conv2d(by_own_range(x, desc=QuantDescriptor(num_bits=4)), by_own_range(layer.weight))
    assert torch.equal(layer(x), wanted)


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("TensorQuantFunction", "tensor_quant"),
        ("FakeTensorQuantFunction", "fake_tensor_quant"),
        ("LegacyFakeTensorQuantFunction", "legacy_fake_tensor_quant"),
        ("FakeAffineTensorQuantFunction", "fake_affine_tensor_quant"),
        ("ScaledE4M3Function", "scaled_e4m3"),
    ],
)
def test_autograd_functions_have_their_names(name, function):
    assert getattr(tq, name).apply is getattr(tq, function)
    assert quant_nn.functional.ClipFunction.apply is quant_nn.functional.clip


def test_cuda_ext_computes_on_any_device():
    cuda_ext = importlib.import_module(f"{OURS}.cuda_ext")
    x, amax = data((2, 3, 4)), torch.tensor([0.5, 1.0, 1e-26])
    wanted = tq.fake_tensor_quant(x, amax.view(1, 3, 1), 4)
    assert torch.equal(cuda_ext.fake_tensor_quant_with_axis(x, amax, axis=1, num_bits=4), wanted)
    y = x.clone().requires_grad_()
    assert not cuda_ext.fake_tensor_quant(y, amax[:1]).requires_grad
    cuda_ext.fake_tensor_quant_(y, amax[0])
    assert torch.equal(y, tq.fake_tensor_quant(x, 0.5))
    assert torch.equal(cuda_ext.fake_e4m3fy(x), x.to(torch.float8_e4m3fn).float())


def test_utils_reduce_amax_is_a_module_and_a_function():
    program = (
        f"from {OURS} import install\ninstall()\nfrom pytorch_quantization import utils\n"
        "from pytorch_quantization.utils.reduce_amax import reduce_amax\nimport pytorch_quantization.utils.reduce_amax\n"
        "print(utils.reduce_amax is reduce_amax)"
    )
    assert run(program).strip() == "True"


def test_quant_logging_removes_the_handlers_of_the_root_logger():
    program = (
        f"import logging\nfrom {OURS} import install\ninstall()\nfrom pytorch_quantization.utils import quant_logging\n"
        "logging.basicConfig()\nquant_logging.reset_logger_handler()\nprint(logging.getLogger().handlers)"
    )
    assert run(program).strip() == "[]"


def run(program: str) -> str:
    result = processes.python("-c", program)
    return result.stdout + result.stderr


def test_install_gives_the_old_import_names():
    program = f"from {OURS} import install\ninstall()\ninstall()\n"
    for path in PATHS:
        program += f"import pytorch_quantization.{path} as new, {OURS}.{path} as old\nassert new is old\n"
    program += (
        "from pytorch_quantization import nn as quant_nn, enable_onnx_export, __version__\nprint(quant_nn.__name__)"
    )
    assert run(program).strip() == f"{OURS}.nn"


def test_install_refuses_what_is_there_already():
    program = "import sys, types\nsys.modules['pytorch_quantization'] = types.ModuleType('pytorch_quantization')\n"
    program += f"from {OURS} import install\ninstall()"
    assert "RuntimeError: install: pytorch_quantization is already imported" in run(program)


def test_a_descriptor_of_the_functions_module_is_the_same():
    assert tq.QuantDescriptor is QuantDescriptor
