"""Specs and data that a quantizer cannot take: the sentence names the quantizer, the rule and what works instead."""

import warnings
from typing import Any

import pytest
import torch
from torch import nn

import qtoolkit as qt


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"quantizer": "lsq_plus"},
            "'lsq_plus' trains the zero point: it needs symmetric=False, got True; take 'lsq' for a",
        ),
        (
            {"quantizer": "pact", "symmetric": False},
            "'pact' trains one bound: it needs symmetric=True, got False; take 'learned_range'",
        ),
        (
            {"quantizer": "learned_range"},
            "'learned_range' trains two bounds: it needs symmetric=False, got True; take 'pact'",
        ),
        (
            {"quantizer": "tqt", "symmetric": False},
            "'tqt' has no zero point: it needs symmetric=True, got False; take 'lsq_plus'",
        ),
        ({"quantizer": "dorefa", "symmetric": False}, "'dorefa' has no zero point: it needs symmetric=True"),
        (
            {"quantizer": "dorefa", "bits": 8},
            "'dorefa' needs bits from 2 to 7 for a weight.* got 8; take 'lsq' for 8 bits",
        ),
        (
            {"quantizer": "apot", "bits": 8},
            "'apot' needs bits from 2 to 6 with signed=True.* got 8; take 'lsq' for more bits",
        ),
        ({"quantizer": "apot", "bits": 6, "signed": False}, "'apot' needs bits from 2 to 5 with signed=False.* got 6"),
        (
            {"quantizer": "qil", "signed": False, "quantizer_args": {"gamma": 0.5}},
            "'qil' needs gamma=1 with signed=False",
        ),
        (
            {"quantizer": "qil", "quantizer_args": {"gamma": 0}},
            "gamma of quantizer='qil' must be a positive number, got 0",
        ),
        (
            {"quantizer": "qil", "quantizer_args": {"learn_gamma": 1}},
            "learn_gamma of quantizer='qil' must be true or false, got 1",
        ),
        (
            {"quantizer": "qil", "quantizer_args": {"gama": 1}},
            "unknown option of quantizer 'qil' 'gama'; did you mean 'gamma'",
        ),
        (
            {"quantizer": "dsq", "quantizer_args": {"alpha": 0.9}},
            r"alpha of quantizer='dsq' must lie in \[0.001, 0.5\], got 0.9",
        ),
        ({"quantizer": "apo"}, "unknown quantizer 'apo'; did you mean 'apot'"),
        *(
            ({"quantizer": name, "format": "e2m1"}, f"format='e2m1' needs quantizer='fixed', got '{name}'")
            for name in ("lsq", "pact", "dsq", "tqt", "dorefa", "apot", "qil")
        ),
        *(
            ({"quantizer": name, "pow2_scale": True}, "pow2_scale=True needs quantizer='fixed' or 'tqt'")
            for name in ("lsq", "pact", "dsq", "dorefa", "apot", "qil")
        ),
    ],
)
def test_a_spec_that_a_quantizer_does_not_have(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        qt.QuantSpec(**{"bits": 4, **fields})


def test_dorefa_names_the_quantizer_that_it_does_not_fit() -> None:
    spec = qt.QuantSpec(bits=4, quantizer="dorefa")
    with pytest.raises(
        ValueError, match="quantizer 'x': quantizer='dorefa' of an activation.* needs signed=False, got True"
    ):
        qt.TensorQuantizer(spec, name="x")
    unsigned = qt.QConfig(None, qt.QuantSpec(bits=4, signed=False, quantizer="dorefa"))
    with pytest.raises(ValueError, match="quantizer '0.weight_quantizer': .* of a weight needs signed=True, got False"):
        qt.prepare(
            nn.Sequential(nn.Linear(4, 2)), qconfig_mapping=qt.QConfigMapping().set_global(unsigned), backend="tensorrt"
        )


@pytest.mark.parametrize("name", ["lsq", "pact", "dsq", "tqt", "apot", "qil"])
def test_a_learned_quantizer_of_zeros_warns_by_name(name: str) -> None:
    learned = qt.QuantSpec(bits=4, quantizer=name)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(learned, learned))
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    nn.init.zeros_(model[1].weight)
    with pytest.warns(UserWarning, match=f"'1.weight_quantizer' has seen zeros only, so quantizer='{name}'.*'fixed'"):
        prepared = qt.prepare(model, torch.ones(2, 4), qconfig_mapping=mapping, backend="tensorrt")
    with pytest.warns(UserWarning, match="quantizer 'activation_quantizers.input_1' has seen zeros only"):
        qt.calibrate(prepared, [torch.zeros(2, 4)], progress=False)


@pytest.mark.parametrize("name", ["lsq", "pact", "dsq", "tqt", "apot", "qil"])
def test_a_learned_quantizer_of_another_constant_starts_there(name: str) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=4, quantizer=name))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with qt.calibrating(quantizer):
            quantizer(torch.full((5,), 3.0))
    y = quantizer(torch.full((5,), 3.0))
    y.sum().backward()
    assert bool(quantizer.scale > 0)
    assert all(bool(p.grad.isfinite().all()) for p in quantizer.parameters())
