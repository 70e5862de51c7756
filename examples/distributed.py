"""Quantization-aware training in several processes, resumable after interruption, on handwritten digits.

torchrun --nproc-per-node 2 examples/distributed.py --out run

Each rank trains on its part of the data with DistributedDataParallel, on the CPU. Every `--every` steps all ranks write a
checkpoint together. If a process is killed, the others exit with an error message. Run the same command again to resume from
the latest checkpoint: the result equals the uninterrupted one, bit for bit. It needs scikit-learn and the extra [checkpoint].
"""

import argparse
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import qtoolkit as qt

BATCH = 32


def network() -> nn.Module:
    """Return a small network, prepared with learned scales; all ranks start with the same weights."""
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    model = nn.Sequential(*layers, nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
    model.extend([nn.Flatten(), nn.Linear(128, 10)])
    learned = qt.QConfig(qt.QuantSpec(quantizer="lsq"), qt.QuantSpec(axis=0, quantizer="lsq"))
    return qt.prepare(model.train(), qconfig_mapping=qt.QConfigMapping().set_global(learned), backend="tensorrt")


def digits() -> TensorDataset:
    """Return images (n, 1, 8, 8) in [0, 1], and their labels."""
    found = load_digits()
    return TensorDataset(torch.from_numpy(found.images).float()[:, None] / 16, torch.from_numpy(found.target).long())


def batches(data: TensorDataset, epochs: int, done: int) -> Iterator[list[Tensor]]:
    """Return this rank's batches, without the batches of the first steps."""
    sampler = DistributedSampler(data)
    # A separate generator: a loader draws a number each time that it starts, and a resumed training starts it once more.
    loader = DataLoader(data, BATCH, sampler=sampler, drop_last=True, generator=torch.Generator())
    for epoch in range(done // len(loader), epochs):
        sampler.set_epoch(epoch)
        for step, batch in enumerate(loader, epoch * len(loader)):
            if step >= done:
                yield batch


def train(model: nn.Module, epochs: int, every: int, out: Path) -> Iterator[int]:
    """Train from the latest checkpoint, or from the start; yield the number of each step, and write checkpoints."""
    data, rank = digits(), distributed.get_rank()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(qt.parameter_groups(model, lr=2e-3, weight_decay=1e-2, scale_lr=1e-3))
    rate = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    checkpoint, step = out / "checkpoint", 0
    if checkpoint.exists():
        step = qt.load_checkpoint(wrapped, checkpoint, optimizer, {"rate": rate}).state["step"]
        print(f"rank {rank}: resumes from the checkpoint of step {step}", flush=True)
    else:
        shard = DataLoader(data, BATCH, sampler=DistributedSampler(data))
        qt.calibrate(wrapped, shard, max_batches=8, forward=lambda model, batch: model(batch[0]), progress=False)
        torch.manual_seed(rank)  # noise differs from rank to rank
    for images, labels in batches(data, epochs, step):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(wrapped(images + 0.1 * torch.randn_like(images)), labels)
        loss.backward()
        optimizer.step()
        rate.step()
        step += 1
        yield step
        if step % every == 0:
            qt.save_checkpoint(wrapped, checkpoint, optimizer, {"rate": rate, "step": step})
            if rank == 0:
                print(f"step {step}: loss {loss.item():.3f}, saved", flush=True)


def main() -> None:
    """Train, and exit with an error message if another process has ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, default=Path("run"), help="folder of the checkpoint and of the trained model"
    )
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--every", type=int, default=20, help="steps between checkpoints")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # torchrun ends the other ranks by it
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
    distributed.init_process_group("gloo")
    rank, model, last = distributed.get_rank(), network(), 0
    try:
        for step in train(model, options.epochs, options.every, options.out):
            last = step
        qt.save_checkpoint(model, options.out / "trained.safetensors")
    except (RuntimeError, KeyboardInterrupt) as error:
        reason = str(error).splitlines()[0] if str(error) else "it was asked to end"
        sys.exit(
            f"rank {rank}: the training ended after step {last} ({reason}). If another process has ended, start the same "
            f"command again: it resumes from the latest checkpoint."
        )
    if rank == 0:
        print(f"trained for {last} steps: {options.out / 'trained.safetensors'}")
    distributed.destroy_process_group()
    sys.stdout.flush()
    # Everything is written. At exit, a gloo thread that still holds a tensor would abort the process (docs/distributed.md).
    os._exit(0)


if __name__ == "__main__":
    main()
