"""Sizes of a traced value: Python computes with them, and torch makes and arranges tensors of them, at any batch size."""

import copy
import functools
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from tests import nets

X = torch.randn(4, 6, 8, generator=torch.Generator().manual_seed(0))


class Sized(nn.Module):
    """Adds to a layer's output what a function makes of a size: a tensor that can be added, or a number."""

    def __init__(self, make: Callable[["Sized", Tensor], Any]) -> None:
        super().__init__()
        self.make, self.fc, self.embed = make, nn.Linear(8, 8), nn.Embedding(16, 8)
        self.table, self.places = torch.rand(9, 6, 8), torch.arange(9)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + self.make(self, x)


def pair(x: Tensor) -> tuple[int, int]:
    b, t, _ = x.size()
    return b, t


# Each depends on the number of images, at which the graph must not stay.
OF_THE_BATCH: dict[str, Callable[[Sized, Tensor], Any]] = {
    "expand": lambda m, x: m.embed(torch.arange(6).expand(x.shape[0], 6)),
    "expand by a tuple": lambda m, x: m.embed(torch.arange(6).expand((x.shape[0], 6))),
    "expand by a size": lambda m, x: m.embed(torch.arange(6).expand(x.shape[:2])),
    "expand by all": lambda m, x: m.embed(torch.arange(6).expand(*x.shape[:2])),
    "expand by a name": lambda m, x: m.embed(torch.arange(6).expand(size=(x.shape[0], 6))),
    "expand unpacked": lambda m, x: m.embed(torch.arange(6).expand(*pair(x))),
    "expand_as": lambda m, x: torch.arange(8.0).expand_as(x),
    "broadcast_to": lambda m, x: torch.arange(8.0).broadcast_to(x.shape),
    "torch.broadcast_to": lambda m, x: torch.broadcast_to(torch.arange(8.0), (x.shape[0], 6, 8)),
    "repeat": lambda m, x: m.embed(torch.arange(6).unsqueeze(0).repeat(x.shape[0], 1)),
    "tile": lambda m, x: torch.linspace(0, 1, 8).tile(x.shape[0], 6, 1),
    "torch.tile": lambda m, x: torch.tile(torch.arange(8.0), (x.shape[0], 6, 1)),
    "repeat_interleave": lambda m, x: m.table[:1].repeat_interleave(x.shape[0], 0),
    "roll": lambda m, x: m.embed(torch.arange(6).roll(x.shape[0], 0)),
    "torch.roll": lambda m, x: torch.roll(torch.arange(6.0), x.shape[0]).unsqueeze(1),
    "view": lambda m, x: torch.arange(6.0).view(1, 6, 1).expand(x.shape[0], 6, 8).reshape(x.shape[0], 48).view(x.shape),
    "reshape": lambda m, x: m.table.narrow(0, 0, x.shape[0]).reshape(x.shape[0], 6, 8),
    "unflatten": lambda m, x: torch.arange(48.0).expand(x.shape[0], 48).flatten().unflatten(0, (x.shape[0], 6, 8)),
    "narrow": lambda m, x: m.table.narrow(0, 0, x.shape[0]),
    "new_zeros": lambda m, x: torch.ones(1).new_zeros(x.shape[0], 6, 8) + 1,
    "new_ones": lambda m, x: m.table.new_ones((x.shape[0], 6, 8)),
    "new_full": lambda m, x: m.table.new_full(x.shape, 2.0),
    "new_empty": lambda m, x: m.table.new_empty(x.shape[0], 1, 1).fill_(3),
    "zeros": lambda m, x: torch.zeros(x.shape[0], 6, 8) + 1,
    "arange": lambda m, x: torch.arange(x.shape[0])[:, None, None],
    "linspace": lambda m, x: torch.linspace(0, 1, x.shape[0])[:, None, None],
    "eye": lambda m, x: torch.eye(x.shape[0])[:, :1, None],
    "tril_indices": lambda m, x: torch.tril_indices(x.shape[0], x.shape[0]).sum(),
    "full": lambda m, x: torch.full((x.shape[0], 1, 1), 2.0),
    "FloatTensor": lambda m, x: torch.FloatTensor(x.size(0), 6, 1).fill_(2),
    "FloatTensor of a size": lambda m, x: torch.FloatTensor(x.shape).fill_(2),
    "LongTensor": lambda m, x: m.embed(torch.LongTensor(x.size(0), 6).fill_(2)),
    "mask": lambda m, x: x.masked_fill(torch.ones(6, 8).triu().bool().expand(x.shape[0], 6, 8), 0.0),
    "interpolate": lambda m, x: F.interpolate(m.table[:1].flatten(1)[None], size=48 * x.shape[0]).view(-1, 6, 8),
    "pad": lambda m, x: F.pad(m.table[:1], (0, 0, 0, 0, 0, x.shape[0] - 1)),
    "one_hot": lambda m, x: F.one_hot(torch.zeros(1, dtype=torch.int64), x.shape[0]).view(-1, 1, 1),
    "round": lambda m, x: round(x.shape[0] * 0.6) + round(x.shape[0] / 3, 1),
    "floor": lambda m, x: math.floor(x.shape[0] / 3) + math.ceil(x.shape[0] / 3) + math.trunc(x.shape[0] / 3),
    "divmod": lambda m, x: divmod(x.shape[0], 3)[0] + divmod(19, x.shape[0])[1],
}  # fmt: skip


@pytest.mark.parametrize("name", OF_THE_BATCH)
def test_tensors_and_numbers_of_a_traced_size_follow_the_batch(name: str) -> None:
    torch.manual_seed(0)
    model = Sized(OF_THE_BATCH[name]).eval()
    prepared = qt.prepare(model, X[:1], backend="onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        nets.assert_float_when_off(ours, model, X)
        nets.assert_float_when_off(ours, model, X[:3])
    assert qt.convert(prepared)(X).shape == X.shape


# Python decides by the number of rows: the graph checks it.
DECISIONS: dict[str, Callable[[Sized, Tensor], Any]] = {
    "key": lambda m, x: {6: 1.0, 7: 2.0}[x.size(1)],
    "key of two": lambda m, x: {(6, 8): 1.0}[x.size(1), x.size(2)],
    "set": lambda m, x: 1.0 if x.size(1) in {6} else 2.0,
    "text": lambda m, x: {"6": 1.0}[f"{x.size(1)}"],
    "padded text": lambda m, x: {"06": 1.0}[f"{x.size(1):02d}"],
    "str": lambda m, x: {"(6, 8)": 1.0}[str(tuple(x.shape[1:]))],
    "dtype": lambda m, x: {torch.float32: 1.0}[x.dtype] * {"torch.float32": 6.0}[str(x.dtype)] / x.size(1).__index__(),
}


@pytest.mark.parametrize("name", DECISIONS)
def test_a_size_that_selects_an_entry_is_checked(name: str) -> None:
    model = Sized(DECISIONS[name]).eval()
    prepared = qt.prepare(model, X, backend="onnxruntime")
    nets.assert_float_when_off(prepared, model, X[:2])
    sentence = r"the model was prepared for inputs of other sizes: .*test_sizes\.py, line"
    with qt.disable_quantization(prepared), pytest.raises(ValueError, match=sentence):
        prepared(X[:, :5])


@functools.cache
def steps(count: int) -> Tensor:
    return torch.arange(count) / 8


@pytest.mark.parametrize("ran", [False, True])
def test_a_cache_of_functools_keeps_no_traced_value(ran: bool) -> None:
    steps.cache_clear()
    model = Sized(lambda m, x: steps(x.size(2)) + steps(x.size(2))).eval()
    expected = model(X)
    if not ran:
        steps.cache_clear()
    for _ in range(2):
        nets.assert_float_when_off(qt.prepare(model, X, backend="onnxruntime"), model, X)
        assert torch.equal(model(X), expected)


MASKS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "buffer": lambda mask, x: mask,
    "computed": lambda mask, x: torch.log(torch.tril(torch.ones(x.size(1), x.size(1)))),
    "not causal": lambda mask, x: mask.flip(0).clamp(min=-1),
}


class Encoder(nn.Module):
    def __init__(self, mask: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.of, self.encoder = MASKS[mask], nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(6))

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x, mask=self.of(self.mask, x))


class Decoder(Encoder):
    def __init__(self, mask: str) -> None:
        super().__init__(mask)
        self.decoder = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(x, x, tgt_mask=self.of(self.mask, x))


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["trace", "export"])
@pytest.mark.parametrize("kind", [Encoder, Decoder])
@pytest.mark.parametrize("mask", MASKS)
def test_transformers_of_torch_with_a_mask_are_captured(mask: str, kind: type[Encoder], capture: str) -> None:
    torch.manual_seed(0)
    for training in (False, True):
        model = kind(mask).train(training)
        prepared = qt.prepare(model, X, "onnxruntime", capture=capture)
        with qt.disable_quantization(prepared):
            torch.testing.assert_close(prepared(X), model(X))
        weights = [line.name for line in qt.quantization_report(prepared).quantized if line.weight]
        assert len(weights) == (6 if kind is Encoder else 7)  # of each block: the attention and two linear layers
