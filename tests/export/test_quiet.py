"""An export prints nothing about what is not the user's business, and hides nothing else."""

import logging
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt
from qtoolkit.export.exporters.quiet import LOGGED, without_noise


class Noisy(nn.Module):
    """Two inputs with one dynamic dimension, and an op whose translation has an empty list."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.max_pool2d(self.conv(x) + y, 2, return_indices=True)[0]


@pytest.mark.parametrize("integer_weights", [True, False])
def test_an_export_is_quiet(tmp_path, caplog, capfd, integer_weights: bool) -> None:
    inputs = torch.rand(4, 3, 6, 6), torch.rand(4, 4, 6, 6)
    prepared = qt.prepare(Noisy().eval(), inputs, backend="tensorrt10")
    qt.calibrate(prepared, [inputs], progress=False)
    sizes = {0: "batch"}
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        qt.export_onnx(
            prepared, inputs, tmp_path / "m.onnx", dynamic_shapes=(sizes, sizes), integer_weights=integer_weights
        )
    assert [record.getMessage() for record in caplog.records] == []
    assert [w.message for w in warned if w.category is UserWarning] == []
    assert capfd.readouterr().out == ""


class Masked(nn.Module):
    """Attention scores with a number that float16 does not have, and that becomes an infinity."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(x).transpose(-1, -2)
        seen = torch.ones(5, 5, dtype=torch.bool).tril()
        return self.last(torch.where(seen, scores, -1e9).softmax(-1))


def test_a_mask_in_float16_raises_no_warning_of_numpy(tmp_path) -> None:
    x = torch.randn(2, 5, 8)
    prepared = qt.prepare(Masked().eval(), x, backend="tensorrt")
    qt.calibrate(prepared, [x], progress=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        qt.export_onnx(prepared, x, tmp_path / "m.onnx")


def test_an_input_that_does_not_fit_prints_no_traceback_of_torch(capfd) -> None:
    x = torch.randn(2, 5, 8)
    prepared = qt.prepare(Masked().eval(), x, backend="tensorrt")
    qt.calibrate(prepared, [x], progress=False)
    for model in (prepared, qt.convert(prepared)):
        with pytest.raises((ValueError, RuntimeError)):
            model(x[..., :7])
    assert "FX-traced" not in capfd.readouterr().err


class Recurrent(nn.Module):
    """One of torch.export's warnings is about an attribute of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.last = nn.LSTM(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0])


class Attends(nn.Module):
    """The weights of queries and keys are split by an op of several outputs, which stays computed."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, kdim=3, vdim=3), nn.Linear(4, 2)
        self.queries = nn.Parameter(torch.rand(3, 2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.attention(self.queries, x, x)[0])


@pytest.mark.slow
@pytest.mark.parametrize(("model", "size"), [(Recurrent, 4), (Attends, 3)])
def test_layers_of_torch_are_exported_in_quiet(tmp_path, caplog, model: type[nn.Module], size: int) -> None:
    inputs = (torch.rand(5, 2, size),)
    prepared = qt.prepare(model().eval(), inputs, backend="onnxruntime")
    qt.calibrate(prepared, [inputs], progress=False)
    with caplog.at_level(logging.WARNING), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        qt.export_onnx(prepared, inputs, tmp_path / "m.onnx")
    assert [record.getMessage() for record in caplog.records] == []
    assert [w.message for w in warned if w.category is UserWarning] == []


@pytest.mark.parametrize(("name", "beginning"), [(name, each) for name in LOGGED for each in LOGGED[name]])
def test_only_these_messages_are_dropped(caplog, name: str, beginning: str) -> None:
    logger = logging.getLogger(name)
    with caplog.at_level(logging.WARNING), without_noise():
        logger.warning("%s: cannot reshape array", beginning)
        logger.warning("something else")
    logger.warning("%s afterwards", beginning)
    assert [record.getMessage() for record in caplog.records] == ["something else", f"{beginning} afterwards"]
