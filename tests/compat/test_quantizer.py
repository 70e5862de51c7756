"""compat.pytorch_quantization's TensorQuantizer and Clip, against the oracle and pytorch-quantization's rules."""

import copy
import pickle

import numpy as np
import pytest
import torch

from qtoolkit.compat.pytorch_quantization import calib, enable_onnx_export
from qtoolkit.compat.pytorch_quantization import nn as quant_nn
from qtoolkit.compat.pytorch_quantization.nn import TensorQuantizer
from qtoolkit.compat.pytorch_quantization.nn.modules import tensor_quantizer
from qtoolkit.compat.pytorch_quantization.nn.modules.export_form import LegacyExportError
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from qtoolkit.running import Run
from tests import reference
from tests.cases import assert_same, leaf


def values() -> torch.Tensor:
    return torch.randn(4, 3, 5, generator=torch.Generator().manual_seed(0))


def wanted(x: torch.Tensor, amax: torch.Tensor | float, bits=8, unsigned=False, narrow=False) -> torch.Tensor:
    return reference.tensor_quant(x, torch.as_tensor(amax), bits, unsigned, narrow)[2]


# ---- numbers


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("bits", [4, 8, 16])
def test_values_are_the_oracles(bits, unsigned, narrow):
    x = values().abs() if unsigned else values()
    quantizer = TensorQuantizer(QuantDescriptor(num_bits=bits, unsigned=unsigned, narrow_range=narrow, amax=1.3))
    assert_same(quantizer(x), wanted(x, 1.3, bits, unsigned, narrow))
    assert quantizer.maxbound == 2 ** (bits - 1 + unsigned) - 1
    assert float(quantizer.step_size) == np.float32(1.3) / np.float32(quantizer.maxbound)


def test_the_default_range_is_the_whole_one():
    quantizer = TensorQuantizer()
    quantizer.amax = 1.0
    assert quantizer(torch.tensor([-9.0, 9.0])).tolist() == [np.float32(-128) / 127, 1.0]


@pytest.mark.parametrize(
    ("axis", "kept"), [(None, ()), (1, (1,)), (-1, (2,)), ((0, -1), (0, 2)), ((0, 1, 2), (0, 1, 2))]
)
def test_without_a_range_each_input_has_its_own(axis, kept):
    x = values()
    amax = x.abs().amax([d for d in range(3) if d not in kept], keepdim=True) if kept != (0, 1, 2) else x.abs()
    y = TensorQuantizer(QuantDescriptor(axis=axis))(x)
    assert_same(y, wanted(x, amax))
    assert "_amax" not in TensorQuantizer(QuantDescriptor(axis=axis)).state_dict()


def test_scale_amax_multiplies_the_range_and_leaves_it():
    quantizer = TensorQuantizer(QuantDescriptor(amax=2.0, scale_amax=0.25))
    assert_same(quantizer(values()), wanted(values(), 0.5))
    assert float(quantizer.amax) == 2


def test_pre_quant_scale_multiplies_even_where_disabled():
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.0))
    quantizer.pre_quant_scale = [[0.5], [2.0], [1.0]]
    scaled = values() * torch.tensor([[0.5], [2.0], [1.0]])
    assert_same(quantizer(values()), wanted(scaled, 1.0))
    quantizer.disable()
    assert torch.equal(quantizer(values()), scaled)
    assert quantizer(values().half()).dtype == torch.float16
    with pytest.raises(RuntimeError, match="Changing shape when setting pre_quant_scale is not allowed"):
        quantizer.pre_quant_scale = 1.0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_stay_and_half_ranges_are_lifted(dtype):
    x = values().to(dtype)
    quantizer = TensorQuantizer(QuantDescriptor(axis=1, amax=[[[0.5], [1.0], [2.0]]])).to(dtype)
    y = quantizer(x)
    assert y.dtype == dtype
    assert_same(y, wanted(x, quantizer.amax.to(dtype)))


def test_codes_instead_of_values():
    for narrow in (False, True):
        quantizer = TensorQuantizer(QuantDescriptor(fake_quant=False, amax=1.0, narrow_range=narrow))
        codes, scale, _, _ = reference.tensor_quant(values(), torch.tensor(1.0), 8, False, narrow)
        assert_same(quantizer(values()), codes)
        assert_same(quantizer.scale, scale)


def test_e4m3():
    quantizer = TensorQuantizer(QuantDescriptor(num_bits=(4, 3), amax=7.0))
    scaled = values() * (448 / torch.tensor(7.0))
    assert torch.equal(quantizer(values()), scaled.to(torch.float8_e4m3fn).float() / (448 / torch.tensor(7.0)))
    assert quantizer.maxbound == 448
    with pytest.raises(NotImplementedError, match="has no integer steps"):
        _ = quantizer.step_size
    with pytest.raises(NotImplementedError, match="fake-quantized only"):
        TensorQuantizer(QuantDescriptor(num_bits=(4, 3), amax=1.0, fake_quant=False))(values())


def test_gradients_pass_inside_the_range():
    x = leaf(torch.tensor([-1.0, 0.3, 1.0, 1.1]))
    TensorQuantizer(QuantDescriptor(amax=1.0))(x).sum().backward()
    assert x.grad.tolist() == [1, 1, 1, 0]


def test_a_range_of_nan_raises():
    with pytest.raises(ValueError, match="QuantDescriptor: amax must not be NaN"):
        QuantDescriptor(amax=[1.0, float("nan")])
    with pytest.raises(ValueError, match="TensorQuantizer: amax must not be NaN"):
        TensorQuantizer().amax = float("nan")
    loaded = TensorQuantizer()
    loaded.load_state_dict({"_amax": torch.tensor(float("nan"))})  # as load_calib_amax(strict=False) once wrote it
    with pytest.raises(ValueError, match="NaN or infinities in amax"):
        loaded(values())
    loaded.disable()
    assert torch.equal(loaded(values()), values())
    assert TensorQuantizer()(values() * float("nan")).isnan().all()


def test_get_amax_is_the_range_for_an_input():
    assert torch.equal(TensorQuantizer()._get_amax(values()), values().abs().max())
    assert torch.equal(
        TensorQuantizer(QuantDescriptor(amax=2.0, scale_amax=0.5))._get_amax(values()), torch.tensor(1.0)
    )


# ---- settings and switches


def test_settings_can_be_changed():
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.0))
    quantizer.num_bits, quantizer.narrow_range = 4, True
    assert_same(quantizer(values()), wanted(values(), 1.0, 4, False, True))
    quantizer.unsigned = True
    assert_same(quantizer(values().abs()), wanted(values().abs(), 1.0, 4, True))
    with pytest.raises(TypeError, match="Negative values encountered"):
        quantizer(values())
    for name in ("axis", "fake_quant", "maxbound", "step_size", "scale"):
        with pytest.raises(AttributeError):
            setattr(quantizer, name, 1)


def test_switches():
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.0), if_quant=False)
    assert torch.equal(quantizer(values()), values())
    quantizer.enable_quant()
    assert not torch.equal(quantizer(values()), values())
    quantizer.disable_quant()
    quantizer.enable_calib()
    quantizer(values())
    quantizer.disable_calib()
    quantizer(10 * values())
    quantizer.load_calib_amax()
    assert torch.equal(quantizer.amax, values().abs().max())
    assert torch.equal(TensorQuantizer(disabled=True)(values()), values())
    assert (quantizer._if_quant, quantizer._if_calib, quantizer._disabled) == (False, False, False)


def test_without_a_calibrator():
    quantizer = TensorQuantizer(if_calib=True)
    quantizer._calibrator = None
    with pytest.raises(RuntimeError, match="Calibrator was not created"):
        quantizer(values())
    with pytest.raises(ValueError, match="cannot enable calibration"):
        quantizer.enable_calib()
    with pytest.raises(RuntimeError, match="Calibrator not created"):
        quantizer.load_calib_amax()


def test_calibrators_follow_the_descriptor():
    assert type(TensorQuantizer()._calibrator) is calib.MaxCalibrator
    assert type(TensorQuantizer(QuantDescriptor(calib_method="histogram"))._calibrator) is calib.HistogramCalibrator


def test_ranges_are_calibrated_per_channel():
    quantizer = TensorQuantizer(QuantDescriptor(axis=1), if_quant=False, if_calib=True)
    quantizer(values())
    quantizer(-2 * values())
    quantizer.load_calib_amax()
    assert torch.equal(quantizer.amax, 2 * values().abs().amax((0, 2), keepdim=True))


def test_a_histogram_needs_no_method():
    quantizer = TensorQuantizer(QuantDescriptor(calib_method="histogram"), if_quant=False, if_calib=True)
    quantizer(values())
    quantizer.load_calib_amax()
    default = quantizer.amax.clone()
    quantizer.load_calib_amax("percentile", percentile=99.99)
    assert torch.equal(quantizer.amax, default)
    quantizer.load_calib_amax(method="percentile", percentile=50)
    assert quantizer.amax < default


def test_a_calibrator_that_saw_nothing():
    quantizer = TensorQuantizer(QuantDescriptor(amax=3.0))
    with pytest.raises(RuntimeError, match="Calibrator returned None.*strict=False"):
        quantizer.load_calib_amax()
    with pytest.warns(UserWarning, match="Calibrator returned None.*The range does not change: 3.0000"):
        quantizer.load_calib_amax(strict=False)
    assert float(quantizer.amax) == 3
    fresh = TensorQuantizer()
    with pytest.warns(UserWarning, match="dynamic"):
        fresh.load_calib_amax(strict=False)
    assert fresh.amax is None


def test_amax_keeps_its_shape():
    quantizer = TensorQuantizer()
    assert quantizer.amax is None
    quantizer.amax = np.array([[1.0], [2.0]])
    quantizer.amax = torch.tensor([[3.0], [4.0]])
    assert quantizer.amax.tolist() == [[3], [4]]
    with pytest.raises(RuntimeError, match="Changing shape when setting amax is not allowed."):
        quantizer.amax = 1.0
    with pytest.warns(UserWarning, match="setting amax to None has no effect"):
        quantizer.amax = None
    del quantizer._amax
    quantizer.amax = 1.0
    assert quantizer.amax.dtype == torch.float32


def test_what_there_is_not_is_warned_of():
    with pytest.warns(UserWarning, match="no step_size without an amax"):
        assert TensorQuantizer().step_size is None
    with pytest.warns(UserWarning, match="there is no scale"):
        assert TensorQuantizer().scale is None


# ---- trained ranges


def test_trained_bounds_clip_and_get_gradients():
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True, amax=1.0))
    assert {name for name, _ in quantizer.named_parameters()} == {"clip.clip_value_min", "clip.clip_value_max"}
    x = leaf(torch.tensor([-3.0, -2.0, 0.5, 4.0]))
    y = quantizer(x)
    y.sum().backward()
    assert_same(y, wanted(torch.tensor([-1.0, -1.0, 0.5, 1.0]), 1.0))
    assert (float(quantizer.clip.clip_value_min.grad), float(quantizer.clip.clip_value_max.grad)) == (2, 1)
    assert x.grad.tolist() == [0, 0, 1, 0]
    with torch.no_grad():
        quantizer.clip.clip_value_max.fill_(3.0)
    assert_same(quantizer(torch.tensor([2.0])), wanted(torch.tensor([2.0]), 3.0))


def test_trained_bounds_start_at_the_range():
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True))
    assert quantizer.clip.clip_value_max.tolist() == 1
    with pytest.raises(RuntimeError, match="init_learn_amax needs an amax"):
        quantizer.init_learn_amax()
    quantizer.amax = 2.5
    quantizer.init_learn_amax()
    assert [bound.tolist() for bound in quantizer.clip.parameters()] == [-2.5, 2.5]
    loaded = TensorQuantizer(QuantDescriptor(learn_amax=True))
    loaded.load_state_dict(quantizer.state_dict())
    assert loaded.clip.clip_value_max.tolist() == 2.5
    with pytest.raises(RuntimeError, match="Called init_learn_amax with learn_amax=False"):
        TensorQuantizer(QuantDescriptor(amax=1.0)).init_learn_amax()


def test_one_trained_range_starts_at_the_largest():
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True))
    quantizer.amax = [1.0, 4.0]
    with pytest.warns(UserWarning, match="starts at the largest amax"):
        quantizer.init_learn_amax()
    assert quantizer.clip.clip_value_max.tolist() == 4


def test_clipping_can_be_switched():
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True), if_quant=False)
    quantizer.disable_clip()
    assert torch.equal(quantizer(9 * values()), 9 * values())
    assert not any(p.requires_grad for p in quantizer.parameters())
    quantizer.enable_clip()
    assert torch.equal(quantizer(9 * values()), (9 * values()).clamp(-1, 1))
    assert all(p.requires_grad for p in quantizer.parameters())
    for make in (lambda: TensorQuantizer(if_clip=True), lambda: TensorQuantizer().enable_clip()):
        with pytest.raises(ValueError, match="Cannot enable clip"):
            make()
    TensorQuantizer().disable_clip()


def test_bounds_that_are_no_longer_trained_still_clip_what_is_quantized():
    quantizer = TensorQuantizer(QuantDescriptor(learn_amax=True))
    with torch.no_grad():
        quantizer.clip.clip_value_min.fill_(-0.25)
    quantizer.disable_clip()
    x = leaf(torch.tensor([-3.0, -0.25, 0.5, 2.0]))
    y = quantizer(x)
    y.sum().backward()
    assert_same(y, wanted(torch.tensor([-0.25, -0.25, 0.5, 1.0]), 1.0))
    assert x.grad.tolist() == [0, 0, 1, 0]
    assert all(bound.grad is None for bound in quantizer.clip.parameters())


def test_clip_has_fixed_and_trained_bounds():
    clip = quant_nn.Clip(torch.tensor([-1.0, -2.0]), 1.0, learn_max=True)
    assert clip(torch.tensor([[-5.0, -5.0], [0.5, 5.0]])).tolist() == [[-1, -2], [0.5, 1]]
    assert [name for name, _ in clip.named_parameters()] == ["clip_value_max"]
    assert [name for name, _ in clip.named_buffers()] == ["clip_value_min"]
    with pytest.raises(ValueError, match=r"clip_value_min must be scalar to be trained, got \[2\]"):
        quant_nn.Clip(np.array([-1.0, -2.0]), 1.0, learn_min=True)
    assert quant_nn.Clip(np.array(-1.0), 1.0, learn_min=True).clip_value_min.requires_grad


def test_a_trained_bound_is_no_tensor():
    for learned in ("min", "max"):
        with pytest.raises(
            ValueError, match=f"clip_value_{learned} must be scalar to be trained, got a tensor, .* float"
        ):
            quant_nn.Clip(torch.tensor(0.3), torch.tensor(0.7), **{f"learn_{learned}": True})


# ---- state


def test_ranges_load_into_a_bare_quantizer():
    full = TensorQuantizer(QuantDescriptor(axis=1, amax=[[[0.5], [1.0], [2.0]]]))
    full.pre_quant_scale = 0.5
    bare = TensorQuantizer(QuantDescriptor(axis=1))
    bare.load_state_dict(full.state_dict())
    assert torch.equal(bare(values()), full(values()))
    assert set(bare.state_dict()) == {"_amax", "_pre_quant_scale"}
    with pytest.raises(RuntimeError, match="Missing key"):
        full.load_state_dict({})
    with pytest.raises(RuntimeError, match="size mismatch for _amax"):
        full.load_state_dict({"_amax": torch.tensor(1.0), "_pre_quant_scale": torch.tensor(1.0)})


def test_copies_and_pickles_compute_the_same():
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.5))
    for other in (copy.deepcopy(quantizer), pickle.loads(pickle.dumps(quantizer))):
        assert torch.equal(other(values()), quantizer(values()))
        assert other.extra_repr() == quantizer.extra_repr()


def test_a_range_moves_to_its_inputs_device():
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.5))
    assert quantizer(torch.empty(3, device="meta")).device.type == "meta"
    assert quantizer.amax.device.type == "meta"


@pytest.mark.parametrize(
    ("fields", "wanted_repr"),
    [
        ({}, "8bit fake per-tensor amax=dynamic calibrator=MaxCalibrator quant"),
        (
            {"num_bits": 4, "unsigned": True, "axis": 0, "amax": [0.5, 2.0], "calib_method": "histogram"},
            "unsigned 4bit fake axis=0 amax=[0.5000, 2.0000](2) calibrator=HistogramCalibrator quant",
        ),
        (
            {"narrow_range": True, "learn_amax": True, "amax": 1.0, "scale_amax": 0.5},
            "8bit narrow fake per-tensor amax=1.0000 *0.5 learned calibrator=MaxCalibrator quant clip",
        ),
    ],
)
def test_repr(fields, wanted_repr):
    quantizer = TensorQuantizer(QuantDescriptor(**fields))
    assert quantizer.extra_repr() == wanted_repr
    quantizer.disable()
    assert quantizer.extra_repr() == "disabled"


def test_compiles_and_exports_without_breaks():
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.5))
    compiled = torch.compile(quantizer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(values()), quantizer(values()))


# ---- the form for exporters


@pytest.fixture(params=["enable_onnx_export", "use_fb_fake_quant"])
def exporting(request, monkeypatch):
    if request.param == "use_fb_fake_quant":
        monkeypatch.setattr(TensorQuantizer, "use_fb_fake_quant", True)
        yield
    else:
        with enable_onnx_export():
            yield


@pytest.mark.usefixtures("exporting")
@pytest.mark.parametrize(("axis", "shape"), [(None, ()), (1, (1, 3, 1)), (-1, (5,))])
@pytest.mark.parametrize("unsigned", [False, True])
def test_the_exported_form_is_onnxs_grid(axis, shape, unsigned):
    amax = torch.linspace(0, 2, 3 if axis == 1 else 5).reshape(shape) if shape else torch.tensor(1.3)
    quantizer = TensorQuantizer(QuantDescriptor(axis=axis, amax=amax.numpy(), unsigned=unsigned))
    bound, low = (255, 0) if unsigned else (127, -128)
    scale = torch.where(amax == 0, torch.ones(()), amax / bound).flatten()
    x = values().abs() if unsigned else values()
    # torch multiplies by the reciprocal of the scale: a tie may fall the other way than in ONNX
    inverse = 1 / scale.reshape(shape)
    q = torch.round(x * inverse).clamp(low, bound)
    assert torch.equal(quantizer(x), q * scale.reshape(shape))


@pytest.mark.usefixtures("exporting")
def test_the_exported_form_has_one_axis():
    with pytest.raises(LegacyExportError, match=r"one channel axis, got an amax of shape \[4, 3, 1\]"):
        TensorQuantizer(QuantDescriptor(amax=np.ones((4, 3, 1))))(values())


@pytest.mark.usefixtures("exporting")
def test_disabled_quantizers_pass_through():
    assert torch.equal(TensorQuantizer(disabled=True)(values()), values())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_bits": 4, "amax": 1.0}, "must have 8 bits, or be E4M3, got num_bits=4"),
        ({"num_bits": (4, 3), "amax": [1.0, 2.0]}, r"FP8 ops support one range, got an amax of shape \[2\]"),
        ({}, "a quantizer has no amax"),
        ({"amax": 1.0, "narrow_range": True}, "must have narrow_range=False"),
    ],
)
@pytest.mark.parametrize("error", [ValueError, AssertionError])
def test_export_is_checked(fields, words, error):
    with enable_onnx_export(), pytest.raises(error, match=words):
        TensorQuantizer(QuantDescriptor(**fields))(values())


def test_narrow_codes_are_refused_wherever_the_form_is_computed(monkeypatch):
    quantizer = TensorQuantizer(QuantDescriptor(amax=1.0, narrow_range=True))
    monkeypatch.setattr(TensorQuantizer, "use_fb_fake_quant", True)
    with pytest.raises(LegacyExportError, match="must have narrow_range=False to be exported"):
        quantizer(values())
    monkeypatch.setattr(TensorQuantizer, "use_fb_fake_quant", False)
    monkeypatch.setattr(tensor_quantizer, "running", lambda: Run.TRACED_FOR_ONNX)
    with pytest.raises(LegacyExportError, match="must have narrow_range=False to be exported"):
        quantizer(values())
    quantizer.unsigned = True
    assert quantizer(values().abs()).max() == 1


@pytest.mark.parametrize("dynamo", [True, False])
def test_exporters_find_the_form_without_a_switch(dynamo, tmp_path):
    onnx = pytest.importorskip("onnx")
    quantizer = TensorQuantizer(QuantDescriptor(axis=1, amax=[[[0.5], [1.0], [2.0]]])).eval()
    torch.onnx.export(quantizer, (values(),), tmp_path / "q.onnx", dynamo=dynamo)
    nodes = [node.op_type for node in onnx.load(tmp_path / "q.onnx").graph.node]
    assert nodes.count("QuantizeLinear") == nodes.count("DequantizeLinear") == 1
    assert_same(quantizer(values()), wanted(values(), quantizer.amax))


def test_export_mode_ends_however_the_block_does():
    with pytest.raises(KeyError), enable_onnx_export(), enable_onnx_export():
        raise KeyError
    assert not TensorQuantizer._enable_onnx_export
    with enable_onnx_export():
        with enable_onnx_export():
            pass
        assert TensorQuantizer._enable_onnx_export


# ---- devices


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("axis", [None, 1, (0, 1)])
def test_a_gpu_computes_the_same(axis, narrow):
    quantizer = TensorQuantizer(QuantDescriptor(axis=axis, narrow_range=narrow), if_calib=True, if_quant=False)
    quantizer(values() / 2)
    quantizer.load_calib_amax()
    quantizer.disable_calib()
    quantizer.enable_quant()
    on_cpu = quantizer(values())
    on_gpu = quantizer(values().cuda())
    assert quantizer.amax.is_cuda
    assert torch.equal(on_gpu.cpu(), on_cpu)
