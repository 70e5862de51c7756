"""The gradient factor of LSQ, 1 / sqrt(N qmax): with it two bits train at a rate at which a factor of 1 diverges."""

import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor

import qtoolkit as qt
from qtoolkit.quantizers.kinds.lsq import LSQ
from qtoolkit.quantizers.table import QUANTIZERS
from tests.quantizers.test_lsq_start import Net, train


class WithoutFactor(LSQ):
    def grad_factor(self, quantizer: qt.TensorQuantizer, x: Tensor) -> float:
        return 1.0


@pytest.mark.slow
def test_training_converges_with_the_factor_and_not_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(QUANTIZERS, "lsq_without_factor", WithoutFactor())
    digits = load_digits()
    x, y = torch.tensor(digits.images / 16, dtype=torch.float32)[:, None], torch.tensor(digits.target)
    model = Net()
    train(model, x[:1200], y[:1200], 8, 0.05)
    found = {}
    for name in ("lsq", "lsq_without_factor"):
        activation = qt.QuantSpec(bits=2, signed=False, symmetric=False, quantizer=name)
        mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(bits=2, quantizer=name)))
        prepared = qt.prepare(
            model.train(), backend="onnxruntime", qconfig_mapping=mapping, training_arithmetic="float"
        )
        qt.calibrate(prepared, [x[:1200]], progress=False)
        torch.manual_seed(0)
        train(prepared, x[:1200], y[:1200], 4, 0.1)
        found[name] = (prepared.eval()(x[1200:]).argmax(1) == y[1200:]).float().mean().item()
    assert found["lsq"] > 0.8, found
    assert found["lsq_without_factor"] < 0.5, found
