"""Multi-head attention: equal to torch's with quantizers off in every option, every quantizer used, codes in onnxruntime."""

import copy
import pickle
from dataclasses import replace

import onnx
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests.copies import made_once

E, HEADS, B, L, S = 8, 2, 3, 5, 7
SPEC, ACTIVATION = qt.QuantSpec(bits=4, axis=0), qt.QuantSpec()

OPTIONS = {
    "plain": {},
    "batch_first": {"batch_first": True},
    "no_bias": {"bias": False},
    "other_dims": {"kdim": 6, "vdim": 4},
    "other_dims_no_bias": {"kdim": 6, "bias": False},
    "bias_kv": {"add_bias_kv": True},
    "zero_attn": {"add_zero_attn": True},
    "everything": {"batch_first": True, "add_bias_kv": True, "add_zero_attn": True, "kdim": 6, "vdim": 4},
}


def pair(**options: object) -> tuple[nn.MultiheadAttention, qt.nn.QuantMultiheadAttention]:
    layer = nn.MultiheadAttention(E, HEADS, **options)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)  # torch makes zeros
    return layer, qt.nn.QuantMultiheadAttention.from_float(copy.deepcopy(layer), SPEC, "attn", ACTIVATION)


def inputs(layer: nn.MultiheadAttention, self_attention: bool, batched: bool = True) -> tuple[Tensor, Tensor, Tensor]:
    query = torch.randn(L, B, E) if batched else torch.randn(L, E)
    if self_attention:
        key = value = query
    else:
        key = torch.randn(S, B, layer.kdim) if batched else torch.randn(S, layer.kdim)
        value = torch.randn(S, B, layer.vdim) if batched else torch.randn(S, layer.vdim)
    if not (layer.batch_first and batched):
        return query, key, value
    moved = query.transpose(0, 1)
    return (moved, moved, moved) if self_attention else (moved, key.transpose(0, 1), value.transpose(0, 1))


def masks_of(kind: str, source: int, batched: bool) -> dict[str, object]:
    padding = torch.zeros(B, source, dtype=torch.bool)
    padding[1, -2:] = True
    padding = padding if batched else padding[1]
    empty = padding.clone()
    empty[1 if batched else ...] = True
    behind_the_first = padding.clone()
    behind_the_first[..., 0] = True
    causal = torch.ones(L, source, dtype=torch.bool).triu(1)
    row = torch.zeros(L, source, dtype=torch.bool)
    row[2] = True
    copies = B * HEADS if batched else HEADS
    return {
        "none": {},
        "padding": {"key_padding_mask": padding},
        "float_padding": {"key_padding_mask": torch.randn(padding.shape)},
        "causal": {"attn_mask": causal, "is_causal": True},
        "float_mask": {"attn_mask": torch.randn(L, source)},
        "per_head": {"attn_mask": torch.randn(copies, L, source)},
        "both": {"attn_mask": causal, "key_padding_mask": padding},
        # Some queries have no key.
        "no_key": {"key_padding_mask": empty},
        "no_key_float": {"key_padding_mask": torch.zeros(empty.shape).masked_fill(empty, -torch.inf)},
        "no_key_in_a_row": {"attn_mask": row},
        "no_key_in_a_float_row": {"attn_mask": torch.randn(L, source).masked_fill(row, -torch.inf)},
        "no_key_of_both": {"attn_mask": causal, "key_padding_mask": behind_the_first},
    }[kind]


EMPTY = ("no_key", "no_key_float", "no_key_in_a_row", "no_key_in_a_float_row", "no_key_of_both")


@pytest.mark.sweep(2)
@pytest.mark.parametrize("mask", ["none", "padding", "float_padding", "causal", "float_mask", "per_head", "both"])
@pytest.mark.parametrize("self_attention", [True, False], ids=["self", "cross"])
@pytest.mark.parametrize("options", OPTIONS)
def test_with_quantizers_off_it_is_torchs(options: str, self_attention: bool, mask: str) -> None:
    layer, ours = pair(**OPTIONS[options])
    if self_attention and (layer.kdim, layer.vdim) != (E, E):
        return
    for batched in (True, False):
        args = inputs(layer, self_attention, batched)
        kwargs = masks_of(mask, L if self_attention else S, batched)
        for training in (True, False):
            for need in ({"need_weights": False}, {}, {"average_attn_weights": False}):
                layer.train(training)
                with qt.disable_quantization(ours.train(training)):
                    y, weights = ours(*args, **kwargs, **need)
                expected, expected_weights = layer(*args, **kwargs, **need)
                torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
                assert (weights is None) == (expected_weights is None)
                if weights is not None:
                    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("mask", EMPTY)
@pytest.mark.parametrize("options", ["plain", "batch_first", "other_dims", "bias_kv", "zero_attn"])
def test_a_query_without_keys_gives_zeros_as_torchs(options: str, mask: str) -> None:
    """Outputs and gradients are torch's with quantizers off, and finite with them; with attention weights torch returns NaN."""
    layer, ours = pair(**OPTIONS[options])
    args, kwargs = inputs(layer, False), masks_of(mask, S, True)
    for training in (True, False):
        expected = layer.train(training)(*args, **kwargs, need_weights=False)[0]
        layer.zero_grad()
        expected.square().sum().backward()
        assert expected.isfinite().all()
        for need in (False, True):
            ours.train(training).zero_grad()
            with qt.disable_quantization(ours):
                y = ours(*args, **kwargs, need_weights=need)[0]
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
            y.square().sum().backward()
            for name, parameter in layer.named_parameters():
                torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad(), qt.calibrating(ours):
        ours(*args, **kwargs, need_weights=False)
    ours.zero_grad()
    y = ours.train()(*args, **kwargs, need_weights=False)[0]
    y.square().sum().backward()
    assert all(t.isfinite().all() for t in (y, *(p.grad for p in ours.parameters() if p.grad is not None)))


@pytest.mark.parametrize("mask", [torch.tensor([[True, False], [False, False]]), torch.tensor([[0.5], [-torch.inf]])])
def test_a_query_without_keys_in_dot_product_attention(mask: Tensor) -> None:
    ours = qt.nn.QuantScaledDotProductAttention(activation_spec=qt.QuantSpec())
    q, k, v = (torch.randn(1, 2, 2, 4).requires_grad_() for _ in range(3))
    with qt.calibrating(ours):
        y = ours(q, k, v, mask)
    expected = nn.functional.scaled_dot_product_attention(q, k, v, mask)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(y[:, :, 1], torch.zeros(1, 2, 4))
    gradients = torch.autograd.grad(ours(q, k, v, mask).square().sum(), (q, k, v))
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize("options", OPTIONS)
def test_gradients_with_quantizers_off(options: str) -> None:
    layer, ours = pair(**OPTIONS[options])
    args = inputs(layer, self_attention=False)
    with qt.disable_quantization(ours):
        ours(*args)[0].square().sum().backward()
    layer(*args)[0].square().sum().backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(ours.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-5)


def test_dropout_is_torchs() -> None:
    layer, ours = pair(dropout=0.5)
    args = inputs(layer, self_attention=True)
    with qt.disable_quantization(ours):
        torch.manual_seed(1)
        y, weights = ours(*args, average_attn_weights=False)
    torch.manual_seed(1)
    expected, expected_weights = layer(*args, average_attn_weights=False)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(weights, expected_weights, rtol=1e-6, atol=1e-6)


def calibrated(layer: qt.nn.QuantMultiheadAttention, args: tuple[Tensor, ...]) -> qt.nn.QuantMultiheadAttention:
    qt.calibrate(layer, [args], progress=False)
    return layer


@pytest.mark.parametrize("options", ["plain", "other_dims"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_every_quantizer_is_used_in_eval_mode_too(options: str, need_weights: bool) -> None:
    """torch's fast path in eval mode would skip the quantizers."""
    layer, ours = pair(**OPTIONS[options], batch_first=True)
    args = inputs(layer, self_attention=options == "plain")
    quantizers = qt.quantizers_of(calibrated(ours.eval(), args))
    with torch.no_grad():
        y = ours(*args, need_weights=need_weights)[0]
        for name, quantizer in quantizers.items():
            quantizer.disable()
            assert not torch.equal(ours(*args, need_weights=need_weights)[0], y), name
            quantizer.enable()
    weights = {name for name in quantizers if name.endswith("weight_quantizer")}
    inner = {"query", "key", "value", "softmax", "out_proj_input"}
    projections = (
        {f"{p}_proj_weight_quantizer" for p in "qkv"} if options == "other_dims" else {"in_proj_weight_quantizer"}
    )
    assert {name for name in quantizers if name not in weights} == {f"{name}_quantizer" for name in inner}
    assert weights == {*projections, "out_proj_weight_quantizer"}


def test_the_products_take_values_on_the_grids() -> None:
    layer, ours = pair(batch_first=True)
    (x, _, _) = args = inputs(layer, self_attention=True)
    calibrated(ours, args).eval()
    q = ours

    def on_grid(name: str, tensor: Tensor) -> Tensor:
        return getattr(q, name).to_grid()(tensor)

    weight = on_grid("in_proj_weight_quantizer", layer.in_proj_weight)
    parts = nn.functional.linear(x, weight, layer.in_proj_bias).chunk(3, -1)
    query, key, value = (t.view(B, L, HEADS, E // HEADS).transpose(1, 2) for t in parts)
    query = on_grid("query_quantizer", query * (E // HEADS) ** -0.5)
    scores = query @ on_grid("key_quantizer", key).transpose(-2, -1)
    mixed = on_grid("softmax_quantizer", scores.softmax(-1)) @ on_grid("value_quantizer", value)
    mixed = on_grid("out_proj_input_quantizer", mixed.transpose(1, 2).reshape(B, L, E))
    expected = nn.functional.linear(
        mixed, on_grid("out_proj_weight_quantizer", layer.out_proj.weight), layer.out_proj.bias
    )
    torch.testing.assert_close(ours(*args)[0], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS)
def test_from_float_and_back(options: str) -> None:
    layer = nn.MultiheadAttention(E, HEADS, **OPTIONS[options])
    ours = qt.nn.QuantMultiheadAttention.from_float(layer, SPEC, "attn", ACTIVATION)
    assert {n for n, _ in layer.named_parameters()} == {n for n, _ in ours.named_parameters()}
    ours.load_state_dict(layer.state_dict())
    back = ours.to_float()
    assert type(back) is nn.MultiheadAttention
    assert vars(back).keys() == vars(layer).keys()
    assert [type(m) for m in back.modules()] == [type(m) for m in layer.modules()]
    assert not layer._forward_pre_hooks
    assert not back._forward_pre_hooks
    args = inputs(layer, self_attention=False)
    assert torch.equal(back(*args)[0], layer(*args)[0])
    assert torch.equal(ours.forward_fp32(*args)[0], layer(*args)[0])


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_compute_the_same_and_go_back_to_float(copy_of) -> None:
    layer, ours = pair()
    args = inputs(layer, self_attention=False)
    twin = copy_of(calibrated(ours, args))
    assert torch.equal(twin(*args)[0], ours(*args)[0])
    assert not twin.to_float()._forward_pre_hooks


def test_bad_inputs() -> None:
    _, ours = pair()
    x = torch.randn(L, B, E)
    with pytest.raises(ValueError, match="must all have 2 or all have 3 dimensions, got 3, 3 and 2"):
        ours(x, x, x[0])
    with pytest.raises(ValueError, match="is_causal=True is a hint about attn_mask; pass the mask"):
        ours(x, x, x, is_causal=True)
    nested = torch.nested.nested_tensor([torch.randn(2, E), torch.randn(3, E)])
    with pytest.raises(ValueError, match="must not be nested tensors; build the TransformerEncoder with enable_nested"):
        ours(nested, nested, nested)
    with pytest.raises(TypeError, match="takes a MultiheadAttention, got Linear"):
        qt.nn.QuantMultiheadAttention.from_float(nn.Linear(2, 2), SPEC)


# ---- in a model


class Block(nn.Module):
    """Self-attention and cross-attention, with residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(E, HEADS, batch_first=True)
        self.cross = nn.MultiheadAttention(E, HEADS, batch_first=True, kdim=6, vdim=6)
        self.norm, self.head = nn.LayerNorm(E), nn.Linear(E, 4)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return self.head(x + self.cross(self.norm(x), memory, memory)[0])


@made_once
def prepared_block(backend: str = "onnxruntime") -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    x = torch.randn(B, L, E), torch.randn(B, S, 6)
    prepared = qt.prepare(Block().eval(), x, backend=backend)
    qt.calibrate(prepared, [x], progress=False)
    return prepared, x


def test_in_a_graph_its_inputs_are_quantized_once_each() -> None:
    prepared, _ = prepared_block()
    assert type(prepared.get_submodule("attn")) is qt.nn.QuantMultiheadAttention
    report = qt.quantization_report(prepared)
    lines = {line.name: line for line in report.layers}
    assert lines["attn"].status == lines["cross"].status == "quantized"
    assert lines["attn"].weight == "int8 per-channel(0)"
    assert len(lines["attn"].inputs) == 1
    assert len(lines["cross"].inputs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["onnxruntime", "tensorrt"])
def test_codes_in_onnxruntime(tmp_path, backend: str) -> None:
    prepared, x = prepared_block(backend)
    result = qt.export_onnx(prepared, x, tmp_path / "m.onnx")
    codes = result.verification
    assert codes.missing == ()
    assert codes.weight_codes.compared == 3 * E * E + E * E + E * E + 2 * 6 * E + E * E + 4 * E
    assert codes.weight_codes.differing == codes.quantizer_codes.differing == 0
    names = {n.name for n in onnx.load(str(result.path)).graph.node if n.op_type == "QuantizeLinear"}
    for layer in ("attn", "cross"):
        for inner in ("query", "key", "value", "softmax", "out_proj_input"):
            assert f"{layer}.{inner}_quantizer.quantize" in names


def test_converted_is_equal_in_eval() -> None:
    prepared, x = prepared_block()
    converted = qt.convert(prepared)
    assert torch.equal(converted(*x), prepared.eval()(*x))
    assert not qt.quantizers_of(converted)


def test_training_reaches_every_parameter() -> None:
    prepared, x = prepared_block()
    prepared.train()(*x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())


@pytest.mark.sweep  # test_projection.py compiles one attention
def test_training_compiles() -> None:
    prepared, x = prepared_block()
    prepared.train()
    twin = copy.deepcopy(prepared)
    prepared(*x).square().sum().backward()
    torch.compile(twin, fullgraph=True, backend="aot_eager")(*x).square().sum().backward()
    for name, parameter in prepared.named_parameters():
        torch.testing.assert_close(twin.get_parameter(name).grad, parameter.grad, rtol=1e-4, atol=1e-4)


def test_a_mapping_leaves_it_float() -> None:
    mapping = qt.QConfigMapping().set_object_type(nn.MultiheadAttention, None)
    prepared = qt.prepare(Block().eval(), backend="onnxruntime", qconfig_mapping=mapping)
    assert type(prepared.get_submodule("attn")) is nn.MultiheadAttention
    lines = {line.name: line for line in qt.quantization_report(prepared).layers}
    assert lines["attn"].reason == "float: the qconfig_mapping leaves it in float"
    assert lines["attn"].inputs == ()


def test_it_keeps_an_encoder_layer_off_the_fused_float_kernel() -> None:
    layer = nn.TransformerEncoderLayer(E, HEADS, 16, batch_first=True).eval()
    x = torch.randn(B, L, E)
    with torch.no_grad():
        expected = layer(x)
        layer.self_attn = qt.nn.QuantMultiheadAttention.from_float(layer.self_attn, SPEC, "attn", ACTIVATION)
        qt.calibrate(layer, [x], progress=False)
        assert all(quantizer.observer.seen() for quantizer in qt.quantizers_of(layer).values())
        assert not torch.equal(layer(x), expected)
        with qt.disable_quantization(layer):
            torch.testing.assert_close(layer(x), expected, rtol=1e-5, atol=1e-5)


# ---- the op of training


LEARNED = qt.QuantSpec(quantizer="lsq")
AFFINE = qt.QuantSpec(quantizer="lsq_plus", symmetric=False)


def trains(options: dict[str, object], spec: qt.QuantSpec = LEARNED) -> nn.Module:
    layer = nn.MultiheadAttention(E, HEADS, batch_first=True, **options)
    ours = qt.nn.QuantMultiheadAttention.from_float(layer, SPEC, "attn", spec)
    return calibrated(ours.eval(), (torch.randn(B, L, E),) * 3).train()


def attended(layer: nn.Module, **kwargs: object) -> tuple[int, list[Tensor]]:
    """How often the op is called in a step, and the output with all gradients."""
    torch.manual_seed(5)
    x = torch.randn(B, L, E).requires_grad_()
    layer.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = layer(x, x, x, **{"need_weights": False, **kwargs})[0]
    y.square().sum().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    calls = sum(event.name == "qtoolkit::attention_fake_quant" for event in profile.events())
    return calls, [y.detach(), x.grad, *gradients]


@pytest.mark.sweep(1)
@pytest.mark.parametrize("spec", [LEARNED, AFFINE, qt.QuantSpec(bits=4)], ids=["learned", "affine", "four bits"])
@pytest.mark.parametrize("mask", ["none", "padding", "causal", "float_mask", "per_head", "both", *EMPTY])
def test_a_step_attends_in_one_op(spec: qt.QuantSpec, mask: str) -> None:
    """Its values and gradients are those of the ops one by one, bit for bit on a CPU."""
    layer, masks = trains({}, spec), masks_of(mask, L, True)
    for quantizer in qt.quantizers_of(layer).values():
        quantizer.steps = -1  # behind the first steps, in which ranges follow the data
    calls, found = attended(layer, **masks)
    assert calls == 1
    layer.training_arithmetic = replace(layer.training_arithmetic, save="float")
    calls, wanted = attended(layer, **masks)
    assert calls == 0
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))


def test_where_the_op_may_not_attend() -> None:
    """Where others see the weights, change them, or ask for more gradients, they are made one by one."""
    layer = trains({})
    assert attended(layer)[0] == 1
    assert attended(layer, need_weights=True)[0] == 0
    assert attended(layer, attn_mask=torch.zeros(L, L).requires_grad_())[0] == 0
    assert attended(trains({"dropout": 0.5}))[0] == 0
    seen = []
    hook = layer.softmax_quantizer.register_forward_hook(lambda module, args, y: seen.append(y.shape))
    assert attended(layer)[0] == 0
    assert seen == [(B, HEADS, L, L)]
    hook.remove()
    layer.softmax_quantizer.disable()
    assert attended(layer)[0] == 0
    layer.softmax_quantizer.enable()
    qt.nn.set_training_arithmetic(layer, "integer")
    assert attended(layer)[0] == 0
    qt.nn.set_training_arithmetic(layer)
    with torch.no_grad():
        layer(*[torch.randn(B, L, E)] * 3, need_weights=False)
    assert attended(layer)[0] == 1
    with qt.calibrating(layer):
        assert attended(layer)[0] == 0


def test_gradients_of_gradients_are_those_of_the_ops_one_by_one() -> None:
    """With floats kept for backward, as for every layer."""
    layer = trains({}, qt.QuantSpec())
    qt.nn.set_training_arithmetic(layer, "float", "float")
    x = torch.randn(B, L, E).requires_grad_()
    (first,) = torch.autograd.grad(layer(x, x, x, need_weights=False)[0].square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), x)
    assert second.isfinite().all()
    assert second.any()
