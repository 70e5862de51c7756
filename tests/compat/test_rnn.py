"""pytorch-quantization's LSTM and its cell: the formulas on operands rounded by its own rule."""

import copy
import pickle

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence

from qtoolkit.compat.pytorch_quantization.nn import LSTM, LSTMCell, QuantLSTM, QuantLSTMCell, TensorQuantizer
from qtoolkit.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from tests import reference, reference_layers

F, H, T, B = 4, 5, 6, 3
OPTIONS = {
    "plain": {},
    "two layers": {"num_layers": 2, "bidirectional": True},
    "batch first": {"batch_first": True},
    "no bias": {"bias": False},
}
INPUT = QuantDescriptor(num_bits=6, amax=2.5)


def rounded(values: np.ndarray, amax: Tensor, bits: int = 8) -> np.ndarray:
    codes, scale = reference.tensor_quant(torch.from_numpy(values).float(), amax, bits, False, False)[:2]
    return (codes.double() / scale.double()).numpy()


def weights_of(layer: nn.Module, key: str = "") -> tuple[np.ndarray, ...]:
    """Both weights, rounded together with a range for each row, and the biases."""
    parts = [getattr(layer, f"weight_{of}{key}").detach() for of in ("ih", "hh")]
    both = torch.cat(parts, 1)
    on_grid = rounded(both.double().numpy(), both.abs().amax(1, keepdim=True))
    biases = [getattr(layer, f"bias_{of}{key}") if layer.bias else torch.zeros(1) for of in ("ih", "hh")]
    columns = parts[0].size(1)
    return on_grid[:, :columns], on_grid[:, columns:], *(bias.detach().double().numpy() for bias in biases)


def round_input(values: np.ndarray) -> np.ndarray:
    return rounded(values, torch.tensor(2.5), 6)


def oracle(layer: QuantLSTM, sequence: Tensor) -> tuple[np.ndarray, list[tuple[np.ndarray, ...]]]:
    """The outputs of one sequence (steps, features), and the last state of each layer and direction."""
    x, ends = sequence.double().numpy(), []
    for number in range(layer.num_layers):
        outputs = []
        for suffix in ("", "_reverse") if layer.bidirectional else ("",):
            weights = weights_of(layer, f"_l{number}{suffix}")

            def step(row, state, weights=weights):
                return reference_layers.lstm_step(round_input(row), state, *weights, round_input)

            y, end = reference_layers.recurrent(step, x, (np.zeros(H), np.zeros(H)), reverse=bool(suffix))
            outputs.append(y)
            ends.append(end)
        x = np.concatenate(outputs, -1)
    return x, ends


@pytest.mark.parametrize("options", OPTIONS)
def test_it_computes_the_formulas_on_rounded_operands(options: str) -> None:
    layer = QuantLSTM(F, H, **OPTIONS[options], quant_desc_input=INPUT)
    x = torch.randn(T, B, F)
    y, (h, c) = layer(x.transpose(0, 1) if layer.batch_first else x)
    y = y.transpose(0, 1) if layer.batch_first else y
    for i in range(B):
        wanted, ends = oracle(layer, x[:, i])
        np.testing.assert_allclose(y[:, i].detach().numpy(), wanted, rtol=0, atol=2e-6)
        for found, part in ((h, 0), (c, 1)):
            np.testing.assert_allclose(found[:, i].detach().numpy(), [e[part] for e in ends], rtol=0, atol=2e-6)
    one, _ = layer(x[:, 0])
    torch.testing.assert_close(one, y[:, 0], rtol=0, atol=1e-6)


def test_packed_sequences() -> None:
    layer = QuantLSTM(F, H, bidirectional=True, quant_desc_input=INPUT)
    parts = [torch.randn(n, F) for n in (2, 6, 3)]
    y, _ = layer(pack_sequence(parts, enforce_sorted=False))
    padded, lengths = nn.utils.rnn.pad_packed_sequence(y)
    for i, part in enumerate(parts):
        np.testing.assert_allclose(padded[: lengths[i], i].detach().numpy(), oracle(layer, part)[0], rtol=0, atol=2e-6)


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("batch", [(B,), ()], ids=["batch", "one"])
def test_the_cell_computes_the_formulas_on_rounded_operands(batch: tuple[int, ...], given: bool) -> None:
    cell = QuantLSTMCell(F, H, quant_desc_input=INPUT)
    x, h, c = torch.randn(*batch, F), torch.randn(*batch, H), torch.randn(*batch, H)
    state = (h.double().numpy() * given, c.double().numpy() * given)
    wanted = reference_layers.lstm_step(round_input(x.double().numpy()), state, *weights_of(cell), round_input)
    found = cell(x, (h, c)) if given else cell(x)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a.detach().numpy(), b, rtol=0, atol=1e-6)


def test_its_quantizers_are_lists_by_layer_and_direction() -> None:
    layer = QuantLSTM(F, H, num_layers=2, bidirectional=True)
    for quantizers in (layer._input_quantizers, layer._weight_quantizers):
        assert [type(quantizer) for quantizer in quantizers] == [TensorQuantizer] * 4
    assert {quantizer.axis for quantizer in layer._weight_quantizers} == {0}
    assert {quantizer.axis for quantizer in layer._input_quantizers} == {None}
    assert (LSTM, LSTMCell) == (QuantLSTM, QuantLSTMCell)


def test_calibrated_ranges_are_those_of_both_operands() -> None:
    layer = QuantLSTM(F, H)
    for quantizer in (layer._input_quantizers[0], layer._weight_quantizers[0]):
        quantizer.enable_calib()
        quantizer.disable_quant()
    x = torch.randn(T, B, F) * 3
    y, _ = layer(x)
    for quantizer in (layer._input_quantizers[0], layer._weight_quantizers[0]):
        quantizer.load_calib_amax()
    assert float(layer._input_quantizers[0].amax) == float(x.abs().max())  # states are smaller
    both = torch.cat([layer.weight_ih_l0, layer.weight_hh_l0], 1).detach()
    assert torch.equal(layer._weight_quantizers[0].amax, both.abs().amax(1, keepdim=True))
    twin = nn.LSTM(F, H)
    twin.load_state_dict({name: tensor for name, tensor in layer.state_dict().items() if "quantizer" not in name})
    torch.testing.assert_close(y, twin(x)[0], rtol=1e-5, atol=1e-6)


def test_sixteen_bits_are_near_float() -> None:
    bits = QuantDescriptor(num_bits=16)
    rows = QuantDescriptor(num_bits=16, axis=0)
    layer = QuantLSTM(F, H, 2, bidirectional=True, quant_desc_input=bits, quant_desc_weight=rows)
    twin = nn.LSTM(F, H, 2, bidirectional=True)
    twin.load_state_dict(layer.state_dict())
    x = torch.randn(T, B, F)
    torch.testing.assert_close(layer(x)[0], twin(x)[0], rtol=0, atol=1e-3)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_disabled_lstm_equals_float_bit_for_bit(options: dict) -> None:
    layer, twin = QuantLSTM(F, H, **options), nn.LSTM(F, H, **options)
    twin.load_state_dict(layer.state_dict())
    for number, quantizer in enumerate((*layer._input_quantizers, *layer._weight_quantizers)):
        quantizer.disable() if number % 2 else quantizer.disable_quant()
    for x in (torch.randn(T, B, F), pack_sequence([torch.randn(n, F) for n in (5, 3)])):
        (y, ends), (wanted, wanted_ends) = layer(x), twin(x)
        assert all(map(torch.equal, ends, wanted_ends))
        assert torch.equal(getattr(y, "data", y), getattr(wanted, "data", wanted))
    layer._input_quantizers[0].pre_quant_scale = 0.5
    assert not torch.equal(layer(torch.ones(T, B, F))[0], twin(torch.ones(T, B, F))[0])


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))], ids=["copy", "pickle"])
def test_copies_and_gradients(copy_of) -> None:
    x = torch.randn(T, B, F)
    for layer, args in ((QuantLSTM(F, H), (x,)), (QuantLSTMCell(F, H), (x[0], torch.randn(2, B, H)))):
        assert torch.equal(copy_of(layer)(*args)[0], layer(*args)[0])
        layer(*args)[0].square().sum().backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in layer.parameters())


def test_projections_and_unknown_words_are_refused() -> None:
    with pytest.raises(ValueError, match="proj_size is not supported and must be 0, got 2"):
        QuantLSTM(F, H, proj_size=2)
    with pytest.raises(TypeError, match="Unused keys: quant_desc_inputs"):
        QuantLSTM(F, H, quant_desc_inputs=INPUT)
    with pytest.raises(ValueError, match="Only fake quantization is supported!"):
        QuantLSTMCell(F, H, quant_desc_input=QuantDescriptor(fake_quant=False))
