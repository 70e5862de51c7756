"""Progress bars: on a terminal, after a second, in the first process; nothing anywhere else."""

import io
import os
import pty
import re
import sys
import termios
import threading
import time
from collections.abc import Callable

import pytest
import torch
from torch import nn

import qtoolkit as qt
from qtoolkit import progress
from qtoolkit.progress import batches_of, progress_bar, step


def written_by(function: Callable[[], object], monkeypatch) -> str:
    """Return what a function writes on stderr, which is a terminal."""
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 120))
    parts: list[bytes] = []

    def read() -> None:
        while True:
            try:
                parts.append(os.read(ours, 1 << 16))
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=read)
    reader.start()
    with os.fdopen(theirs, "w") as terminal, monkeypatch.context() as patch:
        patch.setattr(sys, "stderr", terminal)
        function()
    reader.join()
    os.close(ours)
    return b"".join(parts).decode()


class Loops:
    """Loops of the package over something slow."""

    def __init__(self, pause: float, progress: bool = True) -> None:
        self.pause, self.progress = pause, progress
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
        self.batches = [torch.randn(16, 8)] * 4

    def forward(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        time.sleep(self.pause)
        return model(batch)

    def error(self, model: nn.Module) -> float:
        x = self.batches[0]
        return float((self.forward(model, x) - self.model(x)).square().sum())

    def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        return self.forward(model, batch).square().mean()

    def __call__(self) -> None:
        prepared, options = qt.prepare(self.model, backend="tensorrt"), {"progress": self.progress}
        qt.calibrate(prepared, self.batches, forward=self.forward, **options)
        qt.debug.sensitivity(prepared, self.error, higher_is_better=False, **options)
        qt.tuning.bias_correction(prepared, self.batches, forward=self.forward, **options)
        weights = {"0": self.model[0].weight}
        qt.tuning.mixed_precision.hessian_traces(self.model, self.loss, self.batches, weights, probes=2, **options)
        qt.debug.compare(self.model, prepared, self.batches[0], **options)


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
def test_a_terminal_shows_rates_and_the_number_that_matters(monkeypatch) -> None:
    written = written_by(Loops(0.4), monkeypatch)
    assert re.search(r"calibrate: .* (batches/s|s/ batches), (32|48|64) samples", written), written
    assert re.search(r"sensitivity: .*/4 .*worst [02]: [\d.e-]+", written)
    assert re.search(r"bias: .*[02]: by [\d.e-]+", written)
    assert re.search(r"hessian: .*trace [\d.e-]+ ± [\d.e-]+", written)
    assert written.endswith("\r")  # bars disappear at the end


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("pause", "progress"), [(0.0, True), (0.3, False)])
@pytest.mark.slow
def test_loops_of_less_than_a_second_and_progress_false_are_quiet(monkeypatch, pause: float, progress: bool) -> None:
    assert written_by(Loops(pause, progress), monkeypatch) == ""


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.slow
def test_what_is_no_terminal_stays_empty(monkeypatch) -> None:
    pipe = io.StringIO()
    monkeypatch.setattr(sys, "stderr", pipe)
    Loops(0.3)()
    assert pipe.getvalue() == ""


def test_a_step_is_named_at_once(monkeypatch) -> None:
    def steps() -> None:
        with progress_bar("export", "steps", total=2, after=0) as bar:
            step(bar, "writing")
            step(bar, "comparing")

    written = written_by(steps, monkeypatch)
    assert "1/2" in written
    assert "writing" in written
    assert "comparing" in written


def test_other_ranks_are_quiet(monkeypatch) -> None:
    def rank_is(rank: int) -> Callable[[], None]:
        monkeypatch.setattr(progress, "rank", lambda: rank)
        return lambda: step(progress_bar("x", "steps", after=0), "writing")

    assert "writing" in written_by(rank_is(0), monkeypatch)
    assert written_by(rank_is(1), monkeypatch) == ""


def test_batches_pass_through_as_they_are_and_a_break_ends_the_bar() -> None:
    batches = [(torch.ones(2), "a"), {"x": torch.tensor(3.0)}, "text"]
    assert list(batches_of("run", iter(batches), show=True)) == batches
    for batch in batches_of("run", batches, show=True):
        assert batch is batches[0]
        break
