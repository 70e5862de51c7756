"""fuse_modules and the eager flow: chains against the float model, the oracle's operands, and torch's own batch norm."""

import copy
import dataclasses
import pickle
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.eager.fuse import fuse_modules
from qtoolkit.eager.record import chains_of, check_links, plan_of
from qtoolkit.nn.batch_norm import STRATEGIES, LinkedBatchNorm
from qtoolkit.quant_modules import replace
from tests import nets, reference

# Layers, their batch norms, and the shape of an input.
PAIRS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], nn.Module], tuple[int, ...]]] = {
    "conv1d": (lambda: nn.Conv1d(3, 6, 3), nn.BatchNorm1d, (4, 3, 7)),
    "conv2d": (lambda: nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d, (4, 3, 5, 6)),
    "conv3d": (lambda: nn.Conv3d(3, 6, 2), nn.BatchNorm3d, (4, 3, 3, 4, 3)),
    "grouped": (lambda: nn.Conv2d(4, 6, 3, groups=2), nn.BatchNorm2d, (4, 4, 5, 6)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2), nn.BatchNorm1d, (4, 4, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, groups=2, stride=2), nn.BatchNorm2d, (4, 4, 3, 4)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(4, 6, 2, bias=False), nn.BatchNorm3d, (4, 4, 3, 2, 3)),
    "linear": (lambda: nn.Linear(5, 6), nn.BatchNorm1d, (16, 5)),
}
ACTIVATIONS = (nn.ReLU, nn.ReLU6, nn.SiLU, nn.Hardswish, nn.LeakyReLU)
each_pair = pytest.mark.parametrize("pair", PAIRS)


def verdicts(model: nn.Module) -> dict[str, tuple[str, str]]:
    return {name: (verdict.status, verdict.text) for name, verdict in plan_of(model).inside.items()}


class Chain(nn.Module):
    """Layer, batch norm and activation, with a branch on values that no tracer takes."""

    def __init__(self, pair: str, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        layer, norm, self.shape = PAIRS[pair]
        self.conv, self.bn, self.act = layer(), norm(6), activation()

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(x)))
        return y if y.sum() > -1e9 else -y


CHAIN = ["conv", "bn", "act"]


def chain_of(pair: str, training: bool, activation: type[nn.Module] = nn.ReLU) -> tuple[Chain, Tensor]:
    model = Chain(pair, activation)
    nets.trained(model, *model.shape)
    return model.train(training), torch.randn(model.shape)


def calibrated(model: nn.Module, *batches: Tensor) -> nn.Module:
    qt.calibrate(model, batches, progress=False)
    return model


# ---- eval mode: folded at once


@pytest.mark.parametrize("activation", ACTIVATIONS)
@each_pair
def test_a_chain_folded_in_eval_mode_computes_the_same(pair: str, activation: type[nn.Module]) -> None:
    model, x = chain_of(pair, False, activation)
    fused = fuse_modules(model, CHAIN)
    assert type(fused.bn) is nn.Identity
    assert type(fused.conv) is type(model.conv)
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)
    assert type(model.bn) is not nn.Identity
    replaced = replace(fused, backend="tensorrt10")
    with qt.disable_quantization(replaced):
        assert torch.equal(replaced(x), fused(x))


def test_a_channel_with_gamma_zero_is_folded() -> None:
    model, x = chain_of("conv2d", False)
    with torch.no_grad():
        model.bn.weight[2] = 0
    fused = fuse_modules(model, CHAIN)
    assert torch.equal(fused.conv.weight[2], torch.zeros(3, 3, 3))
    torch.testing.assert_close(fused(x), model(x), rtol=1e-5, atol=1e-6)


def test_inplace_keeps_the_modules_and_their_hooks() -> None:
    model, x = chain_of("conv2d", False)
    conv, bn, fired = model.conv, model.bn, []
    handles = [m.register_forward_hook(lambda m, args, y: fired.append(type(m))) for m in (conv, bn)]
    assert fuse_modules(model, [CHAIN], inplace=True) is model
    assert (model.conv, model.bn) == (conv, bn)
    model(x)
    assert fired == [nn.Conv2d, nn.Identity]
    for handle in handles:
        handle.remove()
    model(x)
    assert len(fired) == 2


def test_a_folded_linear_layer_raises_for_inputs_of_three_dimensions() -> None:
    fused = fuse_modules(nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)).eval(), ["0", "1"])
    for model in (fused, copy.deepcopy(fused), replace(fused, backend="tensorrt10")):
        with pytest.raises(ValueError, match=r"needs inputs of 2 dimensions, got shape \(2, 6, 5\)"):
            model(torch.randn(2, 6, 5))


# ---- training mode: linked by replace


def test_names_and_state_do_not_change_in_training_mode() -> None:
    model, _ = chain_of("conv2d", True)
    fused = fuse_modules(model, CHAIN)
    assert [(n, type(m)) for n, m in fused.named_modules()][1:] == [(n, type(m)) for n, m in model.named_modules()][1:]
    assert list(fused.state_dict()) == list(model.state_dict())
    assert set(replace(fused, backend="tensorrt10").state_dict()) >= set(model.state_dict())
    parameters = dict(fused.named_parameters())
    replace(fused, inplace=True, backend="tensorrt10")
    assert all(fused.get_parameter(name) is parameter for name, parameter in parameters.items())


@each_pair
def test_training_with_quantizers_off_equals_the_float_model(pair: str) -> None:
    model, x = chain_of(pair, True)
    replaced = replace(fuse_modules(model, CHAIN), backend="tensorrt10").double()
    model, x = model.double(), x.double()
    with qt.disable_quantization(replaced):
        for net in (model, replaced):
            net.train()(x).square().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(replaced.get_parameter(name).grad, parameter.grad, rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(replaced.bn.running_mean, model.bn.running_mean, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(replaced.bn.running_var, model.bn.running_var, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(replaced.eval()(x), model.eval()(x), rtol=1e-9, atol=1e-9)


@each_pair
def test_in_eval_mode_the_weight_is_quantized_as_folded(pair: str) -> None:
    model, x = chain_of(pair, True)
    replaced = calibrated(replace(fuse_modules(model, CHAIN), backend="tensorrt10"), x).eval()
    layer = replaced.conv
    factor = model.bn.weight.detach() * torch.rsqrt(model.bn.running_var + model.bn.eps)
    transposed = "transpose" in pair
    group, axis = (getattr(layer, "groups", 1), 1) if transposed else (1, 0)
    shape = [-1] + [1] * (layer.weight.dim() - 1)
    weight = layer.weight.detach()
    if transposed:
        grouped = weight.reshape(group, -1, *weight.shape[1:])
        weight = (grouped * factor.reshape(group, 1, -1, *shape[2:])).reshape(weight.shape)
    else:
        weight = weight * factor.reshape(shape)
    lo, hi = reference.minmax(weight, axis, group)
    scale = torch.maximum(-lo, hi) / 127
    assert torch.equal(layer.weight_quantizer.scale, scale)
    bias = 0 if layer.bias is None else layer.bias.detach()
    operands = (
        reference.fake_quant(x, x.abs().max() / 127, None, -128, 127),
        reference.fake_quant(weight, scale, None, -128, 127, axis, group),
        (bias - model.bn.running_mean) * factor + model.bn.bias.detach(),
    )
    plain = copy.deepcopy(model.conv)
    plain.weight, plain.bias = nn.Parameter(operands[1]), nn.Parameter(operands[2])
    torch.testing.assert_close(replaced(x), F.relu(plain(operands[0])), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_each_strategy_for_batch_norms(strategy: str) -> None:
    model, x = chain_of("conv2d", True)
    backend = dataclasses.replace(qt.backends["tensorrt10"], batch_norm=strategy)
    replaced = calibrated(replace(fuse_modules(model, CHAIN), backend=backend), x)
    assert replaced.bn.strategy == strategy
    replaced.train()(x).sum().backward()
    assert torch.isfinite(replaced.conv.weight.grad).all()


def test_a_gamma_of_zero_trains_without_nan() -> None:
    model, x = chain_of("conv2d", True)
    with torch.no_grad():
        model.bn.weight[2] = 0
    replaced = calibrated(replace(fuse_modules(model, CHAIN), backend="tensorrt10"), x).train()
    replaced(x).square().sum().backward()
    assert all(torch.isfinite(p.grad).all() for p in replaced.parameters())


class Block(nn.Sequential):
    def fuse(self) -> None:
        fuse_modules(self, ["0", "1", "2"], inplace=True)


def test_parts_of_a_model_can_be_fused_one_by_one() -> None:
    model = nn.Sequential(*(Block(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()) for _ in range(2)))
    for module in model.modules():
        if isinstance(module, Block):
            module.fuse()
    expected = [("0.0", "0.1", "0.2"), ("1.0", "1.1", "1.2")]
    assert chains_of(model) == expected
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert chains_of(copied) == expected
    replaced = replace(model, backend="tensorrt10")
    assert [type(block[1]).__name__ for block in replaced] == ["QuantBatchNorm2d"] * 2
    assert replaced[1][0].batch_norm is replaced[1][1]


def test_the_plan_has_the_status_of_batch_norms_in_chains() -> None:
    model = fuse_modules(
        nn.ModuleDict({n: chain_of("conv2d", True)[0] for n in "abc"}), [[f"{n}.{m}" for m in CHAIN] for n in "abc"]
    )
    mapping = qt.QConfigMapping().set_module_name("b.conv", None).set_module_name("c.bn", None)
    replaced = replace(model, mapping, backend="tensorrt10")
    inside = verdicts(replaced)
    assert inside["a.bn"] == ("fused", "'a.conv', the layer before it, computes it")
    assert inside["b.bn"] == ("float", "float: the weight of 'b.conv', its layer, stays float")
    assert inside["c.bn"] == ("float", "float: the qconfig_mapping leaves it in float")
    assert [type(replaced.get_submodule(f"{n}.bn")).__name__ for n in "abc"] == ["QuantBatchNorm2d"] + [
        "BatchNorm2d"
    ] * 2
    assert verdicts(replace(model, ignore="a.bn", backend="tensorrt10"))["a.bn"] == (
        "float",
        "float: excluded by 'a.bn'",
    )
    again = copy.deepcopy(replaced)
    replace(again, mapping, inplace=True, backend="tensorrt10")
    assert plan_of(again) == plan_of(replaced)
    assert again["a"].conv.batch_norm is again["a"].bn


def test_a_float_checkpoint_loaded_afterwards_gives_the_range_of_the_folded_weight() -> None:
    model, _ = chain_of("conv2d", True)
    other, _ = chain_of("conv2d", True)
    with torch.no_grad():
        other.bn.weight.mul_(5)
    weights_only = qt.QConfigMapping().set_global(qt.QConfig(None, qt.QuantSpec(axis=0)))
    replaced = replace(fuse_modules(model, CHAIN), weights_only, backend="tensorrt10")
    replaced.load_state_dict(other.state_dict())
    expected = replace(fuse_modules(other, CHAIN), weights_only, backend="tensorrt10")
    assert torch.equal(replaced.conv.weight_quantizer.scale, expected.conv.weight_quantizer.scale)
    assert not torch.equal(
        replace(model, weights_only, backend="tensorrt10").conv.weight_quantizer.scale,
        expected.conv.weight_quantizer.scale,
    )


# ---- links


def test_batch_norms_replaced_after_linking_raise() -> None:
    model, _ = chain_of("conv2d", True)
    replaced = replace(fuse_modules(nn.Sequential(model), [f"0.{name}" for name in CHAIN]), backend="tensorrt10")
    check_links(replaced)
    check_links(replaced[0])
    check_links(replaced[0].conv)
    check_links(nn.ModuleList([replaced]))
    synchronized = nn.SyncBatchNorm.convert_sync_batchnorm(replaced)
    for whole, part in ((synchronized, ""), (nn.ModuleList([synchronized]), r"0\.")):
        words = rf"'{part}0\.bn' that is linked to layer '{part}0\.conv' is not in the model: .* a SyncBatchNorm\."
        with pytest.raises(ValueError, match=words):
            check_links(whole)


def test_sync_batch_norms_are_linked() -> None:
    model, x = chain_of("conv2d", True)
    replaced = replace(nn.SyncBatchNorm.convert_sync_batchnorm(fuse_modules(model, CHAIN)), backend="tensorrt10")
    check_links(replaced)
    assert type(replaced.bn).__name__ == "QuantSyncBatchNorm"
    assert calibrated(replaced, x)(x).shape == replaced(x).shape


def test_links_of_prepared_parts_are_not_checked() -> None:
    prepared = qt.prepare(nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)), backend="tensorrt10")
    check_links(nn.Sequential(nn.SyncBatchNorm.convert_sync_batchnorm(prepared)))


# ---- outputs


class QuantStub(nn.Module):
    """As torch.ao's: it hands on what it gets."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class FloatFunctional(nn.Module):
    """As torch.ao's."""

    def __init__(self) -> None:
        super().__init__()
        self.activation_post_process = nn.Identity()

    def add(self, x: Tensor, y: Tensor) -> Tensor:
        return self.activation_post_process(x + y)


class Eager(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant, self.plus = QuantStub(), FloatFunctional()
        self.conv, self.bn, self.act, self.fc = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU6(), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act(self.bn(self.conv(self.quant(x))))
        return self.fc(self.plus.add(y, y).mean((2, 3)))


def test_only_outputs_of_layers_chains_and_stubs_are_quantized() -> None:
    model, x = Eager().eval(), torch.randn(2, 3, 4, 4)
    replaced = calibrated(replace(fuse_modules(model, CHAIN), quantize="outputs", backend="tensorrt10"), x)
    names = {"quant.output_quantizer", "act.output_quantizer", "plus.activation_post_process", "fc.output_quantizer"}
    assert set(qt.quantizers_of(replaced)) == names | {"conv.weight_quantizer", "fc.weight_quantizer"}
    fused = fuse_modules(model, CHAIN)

    def fake(y: Tensor, amax: Tensor) -> Tensor:
        return reference.fake_quant(y.detach(), amax / 127, None, -128, 127)

    def weight(layer: nn.Module) -> Tensor:
        scale = layer.weight.detach().abs().flatten(1).amax(1) / 127
        return reference.fake_quant(layer.weight.detach(), scale, None, -128, 127, 0)

    def amax(name: str) -> Tensor:
        observer = replaced.get_submodule(name).observer
        return torch.maximum(-observer.lo, observer.hi)

    assert torch.equal(amax("quant.output_quantizer"), x.abs().max())
    y = F.relu6(F.conv2d(fake(x, amax("quant.output_quantizer")), weight(fused.conv), fused.conv.bias))
    y = fake(y, amax("act.output_quantizer"))
    y = fake(y + y, amax("plus.activation_post_process")).mean((2, 3))
    y = fake(F.linear(y, weight(fused.fc), fused.fc.bias), amax("fc.output_quantizer"))
    assert torch.equal(replaced(x), y)
    inside = verdicts(replaced)
    assert inside["act"] == ("quantized", "its output is quantized, as the output of the chain conv, bn, act")
    assert inside["quant"] == inside["plus"] == ("quantized", "its output is quantized")


def test_replaced_twice_outputs_are_quantized_once() -> None:
    model = replace(fuse_modules(Eager(), CHAIN), quantize="outputs", backend="tensorrt10")
    before = list(qt.quantizers_of(model))
    plan, hooks = plan_of(model), len(model.act._forward_hooks)
    replace(model, quantize="outputs", inplace=True, backend="tensorrt10")
    assert (list(qt.quantizers_of(model)), len(model.act._forward_hooks)) == (before, hooks)
    assert plan_of(model) == plan


def test_with_inputs_quantized_stubs_stay_float_with_a_reason() -> None:
    inside = verdicts(replace(Eager(), backend="tensorrt10"))
    assert inside["quant"] == (
        "float",
        "float: it returns its input unchanged; each layer quantizes its own input",
    )
    assert "use qtoolkit.nn.Add, Mul or Cat" in inside["plus"][1]
    assert "plus.activation_post_process" not in inside


def test_hooks_of_the_user_see_quantized_outputs() -> None:
    model, x, seen = nn.Sequential(nn.Linear(4, 3)), torch.randn(5, 4), []
    model[0].register_forward_hook(lambda m, args, y: seen.append(y))
    calibrated(replace(model, quantize="outputs", inplace=True, backend="tensorrt10"), x)
    seen.clear()
    y = model(x)
    assert seen == [y]
    float_y = F.linear(x, model[0].quantize_weight(model[0].weight), model[0].bias).detach()
    assert torch.equal(y, reference.fake_quant(float_y, model[0].output_quantizer.scale, None, -128, 127))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["deepcopy", "pickle"])
def test_copies_with_hooks_compute_the_same(copied: Callable[[nn.Module], nn.Module]) -> None:
    x = torch.randn(2, 3, 4, 4)
    model = calibrated(replace(fuse_modules(Eager(), CHAIN), quantize="outputs", backend="tensorrt10"), x)
    twin = copied(model)
    assert torch.equal(twin(x), model(x))
    twin.quant.output_quantizer.amax = 0.01
    assert not torch.equal(twin(x), model(x))


def test_the_first_of_several_outputs_is_quantized() -> None:
    model, x = nn.LSTM(4, 3), torch.randn(5, 2, 4)
    replaced = calibrated(replace(model, quantize="outputs", backend="tensorrt10"), x)
    y, (_, c) = replaced(x)
    assert "input_quantizer" not in qt.quantizers_of(replaced)
    scale = replaced.output_quantizer.scale
    assert torch.equal(y, reference.fake_quant(y.detach(), scale, None, -128, 127))
    assert not torch.equal(c.detach(), reference.fake_quant(c.detach(), scale, None, -128, 127))
    packed = nn.utils.rnn.pack_padded_sequence(x, [5, 3])
    data = replaced(packed)[0].data.detach()
    assert torch.equal(data, reference.fake_quant(data, scale, None, -128, 127))


def test_add_modules_have_no_input_quantizers_when_outputs_are_quantized() -> None:
    replaced = replace(nn.Sequential(qt.nn.Add(), nn.AvgPool2d(2)), quantize="outputs", backend="tensorrt10")
    assert set(qt.quantizers_of(replaced)) == {"0.output_quantizer", "1.output_quantizer"}


def test_batch_norm_with_its_activation() -> None:
    model = nets.trained(nn.Sequential(nn.BatchNorm2d(3), nn.ReLU()), 2, 3, 4, 4).eval()
    fused = fuse_modules(model, ["0", "1"])
    assert type(fused[0]) is nn.BatchNorm2d
    assert qt.quantizers_of(replace(fused, backend="tensorrt10")) == {}
    replaced = replace(fused, quantize="outputs", backend="tensorrt10")
    assert set(qt.quantizers_of(replaced)) == {"1.output_quantizer"}
    assert qt.quantizers_of(replace(fused, quantize="outputs", ignore="0", backend="tensorrt10")) == {}


def test_a_layer_goes_back_to_float_without_its_output_quantizer() -> None:
    layer = replace(nn.Linear(4, 2), quantize="outputs", backend="tensorrt10").to_float()
    assert set(layer.state_dict()) == {"weight", "bias"}
    assert layer(torch.ones(1, 4)).shape == (1, 2)
    assert not layer._forward_hooks


def test_stubs_and_chains_of_torch_ao_stay_close_to_the_float_model() -> None:
    ao = pytest.importorskip("torch.ao.quantization")
    model, x = nn.Sequential(ao.QuantStub(), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()), torch.randn(4, 3, 5, 5)
    nets.trained(model, 4, 3, 5, 5).eval()
    replaced = calibrated(replace(fuse_modules(model, ["1", "2", "3"]), quantize="outputs", backend="tensorrt10"), x)
    assert set(qt.quantizers_of(replaced)) == {"0.output_quantizer", "1.weight_quantizer", "3.output_quantizer"}
    error = (replaced(x) - model(x)).abs().max()
    steps = replaced[0].output_quantizer.scale + replaced[3].output_quantizer.scale
    assert 0 < error < 3 * steps


def test_float_functionals_of_torch_ao() -> None:
    ao = pytest.importorskip("torch.ao.nn.quantized")

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.plus = ao.FloatFunctional()

        def forward(self, x: Tensor) -> Tensor:
            return self.plus.add(x, x)

    x = torch.randn(7)
    replaced = calibrated(replace(Sum(), quantize="outputs", backend="tensorrt10"), x)
    assert torch.equal(replaced(x), reference.fake_quant(2 * x, 2 * x.abs().max() / 127, None, -128, 127))


# ---- errors


def mixed() -> nn.Module:
    model, _ = chain_of("conv2d", True)
    model.bn.eval()
    return model


def shared() -> nn.Module:
    model, _ = chain_of("conv2d", True)
    model.again = model.act
    return model


def with_norm(norm: nn.Module) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = Chain("conv2d")
        model.bn = norm
        return model

    return make


def conv2d() -> nn.Module:
    return Chain("conv2d")


@pytest.mark.parametrize(
    ("make", "chains", "words"),
    [
        (conv2d, ["conv", "bnn"], "fuse_modules: unknown module 'bnn'; did you mean 'bn'? Known: act, bn, conv."),
        (conv2d, ["bn", "conv"], "a chain must be a convolution, transposed convolution or linear layer of torch.nn, then"),
        (conv2d, ["bn", "conv"], "got bn (BatchNorm2d), conv (Conv2d)."),
        (conv2d, ["conv"], "got conv (Conv2d)."),
        (conv2d, [[]], "a chain must be a convolution"),
        (conv2d, ["conv", "act", "bn"], "got conv (Conv2d), act (ReLU), bn (BatchNorm2d)."),
        (with_norm(nn.BatchNorm2d(5)), ["conv", "bn"], "'bn' must be a batch norm for the 6 channels of 'conv', a Conv2d;"),
        (with_norm(nn.BatchNorm2d(5)), ["conv", "bn"], "got a BatchNorm2d of 5."),
        (with_norm(nn.BatchNorm1d(6)), ["conv", "bn"], "got a BatchNorm1d of 6."),
        (with_norm(nn.BatchNorm2d(6, track_running_stats=False)), ["conv", "bn"], "'bn' has no running statistics to fold"),
        (mixed, CHAIN, "must be in the same mode, got conv (training), bn (eval), act (training);"),
        (shared, CHAIN, "'act', 'again' are names of one module, which follows several others"),
        (conv2d, [["conv", "bn"], ["bn", "act"]], "'bn' is in two chains, [conv, bn] and [bn, act]; put it in one."),
        (lambda: fuse_modules(conv2d(), CHAIN), ["conv", "act"], "'conv' is in two chains, [conv, bn, act] and [conv, act];"),
        (lambda: replace(conv2d(), backend="tensorrt10"), CHAIN,
         "'conv' is already quantized; call fuse_modules on the float model, then replace."),
    ],
)  # fmt: skip
@pytest.mark.parametrize("inplace", [True, False])
def test_modules_that_make_no_chain_raise(
    make: Callable[[], nn.Module], chains: list, words: str, inplace: bool
) -> None:
    model = make()
    before = [(name, type(module)) for name, module in model.named_modules()]
    with pytest.raises(ValueError) as caught:
        fuse_modules(model, chains, inplace)
    assert words in str(caught.value)
    assert [(name, type(module)) for name, module in model.named_modules()] == before


@pytest.mark.parametrize("chains", ["conv", [["conv", 3]], [["conv", "bn"], "act"], None, {"conv": "bn"}])
def test_chains_are_lists_of_names(chains: object) -> None:
    with pytest.raises(TypeError, match="modules_to_fuse must be a list of names, or a list of such lists, got"):
        fuse_modules(conv2d(), chains)


def test_other_bad_arguments() -> None:
    with pytest.raises(TypeError, match="fuse_modules: model must be a torch.nn.Module, got list"):
        fuse_modules([], ["conv"])
    model = conv2d()
    model.generator = (i for i in range(3))
    with pytest.raises(TypeError, match=r"fuse_modules: the model cannot be copied .*, or pass inplace=True\."):
        fuse_modules(model, CHAIN)
    for name in CHAIN:
        fused = fuse_modules(conv2d(), CHAIN)
        delattr(fused, name)
        with pytest.raises(
            ValueError, match=f"replace: the chain conv, bn, act of fuse_modules: unknown module '{name}'"
        ):
            replace(fused, backend="tensorrt10")


def test_no_chains_change_nothing() -> None:
    model = conv2d()
    assert chains_of(fuse_modules(model, [])) == []
    assert not any(isinstance(m, LinkedBatchNorm) for m in replace(model, backend="tensorrt10").modules())
