"""Every file that a test verifies in onnxruntime is run on a processor without VNNI too, where QEMU emulates one."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from qtoolkit.export.verification.runtimes import onnxruntime_cpu
from qtoolkit.runtimes.execution import Executed
from tests.sessions import has_wide_weights_in
from tests.without_vnni import EMULATOR, WithoutVnni


@pytest.fixture(scope="session")
def without_vnni() -> Iterator[WithoutVnni]:
    """onnxruntime on an emulated processor."""
    if EMULATOR is None:
        pytest.skip("needs QEMU: make emulator")
    emulated = WithoutVnni()
    yield emulated
    emulated.close()


@pytest.fixture(autouse=EMULATOR is not None)
def _every_processor(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Compare the outputs of files that onnxruntime computes in integers alone, bit for bit: their codes are the same there."""
    execute = onnxruntime_cpu.execute

    def execute_on_both(path: Path, inputs: Sequence[Tensor], *rest: Any) -> Executed:
        executed = execute(path, inputs, *rest)
        if all(layer.integer for layer in executed.layers) and executed.layers and not has_wide_weights_in(path):
            emulated: WithoutVnni = request.getfixturevalue("without_vnni")
            for ours, theirs in zip(executed.outputs, emulated.outputs(path, inputs), strict=True):
                np.testing.assert_array_equal(ours, theirs)
        return executed

    monkeypatch.setattr(onnxruntime_cpu, "execute", execute_on_both)
