"""One subject: its training step, its time, its memory, its profile."""

import copy
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import qtoolkit as qt
from benchmarks.measure import kept_storages, sample
from benchmarks.training.networks import NETWORKS
from benchmarks.training.resident import Resident
from benchmarks.training.subjects import builder, kind_of

LEARNING_RATE = 1e-4  # the weights hardly move: all steps are the same work
SLOWEST_OPS = 40
MEMORY_STEPS, PROFILED_STEPS = 3, 7


@dataclass(frozen=True)
class Settings:
    """A subject and what it is trained on: a number of images of a height; `share` is of the channels that are updated."""

    network: str
    subject: str
    backend: str
    count: int
    device: str
    size: int
    share: float = 1.0


@dataclass(frozen=True)
class Memory:
    """Bytes of one step.

    Attributes:
        kept: What autograd's nodes keep for backward: each storage once, without parameters, buffers and the batch.
        held: By how much memory has grown after forward and loss.
        peak: By how much it has grown at the highest point of the step. Gradients of the step before are not counted as
            growth: they are there before the step.
    """

    kept: int
    held: int
    peak: int


class Trainer:
    """A subject with its optimizer and its batch.

    A step is zero_grad, forward, loss, backward, and the step of SGD with momentum. The constructor takes two steps.

    Attributes:
        difference: The distance of the first output to the float model's, relative to the latter.
    """

    def __init__(self, settings: Settings) -> None:
        network = NETWORKS[settings.network]
        self.settings, self.loss = settings, network.loss
        self.batch = network.batch(settings.count, settings.device, settings.size)
        model = network.model(settings.device, settings.size)
        expected = self._output(copy.deepcopy(model))
        self.model = builder(settings.subject, settings.backend)(model, self.batch[0])
        self.difference = float((self._output(self.model) - expected).norm() / expected.norm())
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE, momentum=0.9)
        if settings.share < 1:
            qt.tuning.PartialUpdates(self.model, self.optimizer, settings.share)
        for _ in range(2):
            self._check(self.step())

    def _output(self, model: nn.Module) -> Tensor:
        torch.manual_seed(0)  # the same dropout for all
        return model(self.batch[0]).detach()

    def _check(self, loss: Tensor) -> None:
        if not loss.isfinite():
            raise RuntimeError(f"the loss is {float(loss)}")
        if kind_of(self.settings.subject) == "peer" and self.difference == 0:
            raise RuntimeError("its output is the float model's: it does not quantize")

    def forward(self) -> Tensor:
        """Return the loss of the batch."""
        return self.loss(self.model(self.batch[0]), self.batch[1])

    def step(self) -> Tensor:
        """Train on the batch; return its loss."""
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def sync(self) -> None:
        """Wait for the device."""
        if self.settings.device != "cpu":
            torch.cuda.synchronize()

    def set_threads(self, threads: int) -> None:
        """Set the number of threads, and compile again what is compiled for another."""
        torch.set_num_threads(threads)
        torch.compiler.reset()
        for _ in range(2):
            self.step()

    def time(self) -> float:
        """Return the seconds of a step."""
        return sample(self.step, sync=self.sync)

    def kept(self) -> int:
        """Return the bytes that a step keeps for backward, as `Memory` counts them."""
        states = (*self.model.parameters(), *self.model.buffers(), *self.batch)
        not_counted = {state.untyped_storage().data_ptr() for state in states}
        return sum(size for address, size in kept_storages(self.forward).items() if address not in not_counted)

    def memory(self) -> Memory:
        """Measure the memory of a step."""
        resident, kept = Resident.of(self.settings.device), self.kept()
        gc.collect()
        steps = [self._memory_of_step(resident) for _ in range(MEMORY_STEPS)]
        held, peak = (sorted(values)[MEMORY_STEPS // 2] for values in zip(*steps, strict=True))
        return Memory(kept, held, peak)

    def _memory_of_step(self, resident: Resident) -> tuple[int, int]:
        before = resident.start()
        self.optimizer.zero_grad()
        cleared = resident.now()
        loss = self.forward()
        held = resident.now() - cleared
        loss.backward()
        self.optimizer.step()
        return held, resident.peak() - before

    def profile(self) -> dict[str, float]:
        """Return the seconds of the slowest ops of a step, by name; time in ops that an op calls is theirs.

        They are the medians of several steps, each profiled by itself, after one that does not count: what the profiler
        records takes memory between the tensors, so that some of its steps touch fresh pages, which no step does without it.
        """
        steps = [self._profile_of_step() for _ in range(1 + PROFILED_STEPS)][1:]
        spent = {name: statistics.median(step.get(name, 0.0) for step in steps) for name in set().union(*steps)}
        slowest = sorted(spent, key=lambda name: spent[name], reverse=True)[:SLOWEST_OPS]
        return {name: spent[name] for name in slowest}

    def calls(self) -> tuple[int, int]:
        """Return how many ops a step calls (an optimizer's step is one), and how many with those that ops call.

        They are those of the step with the fewest of some: now and then a step looks at its scales, too.
        """
        steps = (self._profiled_step([torch.profiler.ProfilerActivity.CPU]).events() for _ in range(PROFILED_STEPS))
        return min((sum(event.cpu_parent is None for event in events), len(events)) for events in steps)

    def _profile_of_step(self) -> dict[str, float]:
        activities = [torch.profiler.ProfilerActivity.CPU]
        on_cpu = self.settings.device == "cpu"
        if not on_cpu:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        events = self._profiled_step(activities).key_averages()
        return {
            event.key: 1e-6 * (event.self_cpu_time_total if on_cpu else event.self_device_time_total)
            for event in events
        }

    def _profiled_step(self, activities: Sequence[torch.profiler.ProfilerActivity]) -> torch.profiler.profile:
        with torch.profiler.profile(activities=activities) as profiler:
            self.step()
            self.sync()
        return profiler


REQUESTS: Mapping[str, Callable[..., Any]] = {
    "set_threads": Trainer.set_threads,
    "time": Trainer.time,
    "kept": Trainer.kept,
    "memory": Trainer.memory,
    "profile": Trainer.profile,
    "calls": Trainer.calls,
}
