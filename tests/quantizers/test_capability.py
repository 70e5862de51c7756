"""What a quantizer says of its codes, before and after conversion."""

import copy
import pickle

import pytest

import qtoolkit as qt

# The fields of a spec of an activation, and whether its codes: are summed, are handed to layers, share a byte.
ACTIVATIONS = {
    "int8": ({}, (True, True, False)),
    "uint4": ({"bits": 4, "signed": False, "symmetric": False}, (True, True, True)),
    "int16": ({"bits": 16}, (False, False, False)),
    "per channel": ({"axis": 1}, (True, False, False)),
    "float": ({"format": "e4m3"}, (False, False, False)),
    "dynamic": ({"dynamic": True}, (True, False, False)),
    "shaped": ({"bits": 4, "quantizer": "apot"}, (True, False, False)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_says_what_its_codes_are(name: str) -> None:
    fields, expected = ACTIVATIONS[name]
    quantizer = qt.TensorQuantizer(qt.QuantSpec(**fields), channels=2 if "axis" in fields else None)
    known = quantizer.capability
    assert (known.sums, known.codes, known.packed) == expected
    quantizer.amax = 1.0
    assert quantizer.to_grid().capability.codes == known.codes


def test_the_codes_of_a_shaped_weight_are_those_of_its_grid() -> None:
    """DoReFa's 7 bits without zero are odd codes of 8."""
    known = qt.TensorQuantizer(qt.QuantSpec(bits=7, quantizer="dorefa"), of_weight=True).capability
    assert (known.bits, known.sums, known.direct, known.plain) == (8, True, False, False)


def test_a_quantizer_has_codes_while_it_is_on_and_has_a_range() -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec())
    assert (quantizer.capability.codes, quantizer.capability_now.codes) == (True, False)
    quantizer.amax = 1.0
    assert quantizer.capability_now.codes
    quantizer.disable()
    assert not quantizer.capability_now.codes


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))])
def test_copies_find_it_again(copied) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=4))
    known = quantizer.capability
    assert b"Capability" not in pickle.dumps(quantizer)
    assert copied(quantizer).capability == known
