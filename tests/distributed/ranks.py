"""What each process of a group does for tests/distributed/test_ranks.py; the results are left in files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import qtoolkit as qt
from tests.training.nets import SHAPE, learned, loss_of, quantized, step

BATCHES = 8
OBSERVERS = ("minmax", "clip_std", "lsq", "moving_average", "histogram")


def batches() -> Tensor:
    """Batches of different ranges: the largest values are those of rank 1, at its first step."""
    images = torch.randn(BATCHES, *SHAPE, generator=torch.Generator().manual_seed(1))
    return images * torch.tensor([3, 8, 1, 2, 5, 4, 7, 6]).view(-1, 1, 1, 1, 1)


def images() -> Tensor:
    return batches().flatten(0, 1)


def ranges(model: nn.Module) -> dict[str, Tensor]:
    return {name: quantizer.scale for name, quantizer in qt.quantizers_of(model).items()}


def calibrated_by_a_sharded_loader(rank: int, size: int) -> dict[str, Tensor]:
    """The scales after each rank has seen its share of a loader, through DistributedDataParallel."""
    torch.manual_seed(0)
    model = quantized("graph", "fixed").eval()
    data = TensorDataset(images())
    loader = DataLoader(data, batch_size=1, sampler=DistributedSampler(data, size, rank))
    qt.calibrate(DistributedDataParallel(model), loader, progress=False)
    return ranges(model)


def calibrated_in_a_block(rank: int, size: int, observer: str, idle: bool) -> dict[str, Tensor]:
    """The scales after each rank has seen its share in a loop of its own; `idle` leaves all images to rank 0."""
    torch.manual_seed(0)
    model = quantized("graph", "fixed", observer=observer).eval()
    with torch.no_grad(), qt.calibrating(model):
        for place, image in enumerate(images().split(1)):
            if rank == (0 if idle else place % size):
                model(image)
    return ranges(model)


def observing(observer: str = "moving_average") -> nn.Module:
    """A calibrated model whose activations observe in training."""
    torch.manual_seed(0)
    model = quantized("graph", "fixed", observer=observer)
    qt.calibrate(model, [images()], progress=False, synchronize=False)
    for quantizer in qt.quantizers_of(model).values():
        quantizer.observing = not quantizer.of_weight
    return model.train()


def moving(rank: int, every: int, broadcast: bool) -> dict[str, Any]:
    """Train with ranges that move, on different data on each rank."""
    model = observing()
    if not broadcast:  # each rank would have statistics of its own
        qt.freeze_batch_norm(model)
    wrapped = DistributedDataParallel(model, broadcast_buffers=broadcast)
    optimizer, seen = torch.optim.SGD(model.parameters(), 1e-4), []
    for i in range(4):
        before = observed(model)
        step(wrapped, optimizer, batches()[(2 * i + rank) % BATCHES])
        seen.append((before, observed(model)))
        if i % every == every - 1:
            qt.synchronize_ranges(wrapped)
    with qt.freeze_ranges(model):
        codes = wrapped.eval()(images()[:4])  # batch norms have the statistics of rank 0
    return {"ranges": ranges(model), "seen": seen, "observed": observed(model), "codes": codes.detach()}


def accumulated(rank: int) -> list[dict[str, Tensor]]:
    """What weights are quantized with in the forwards of some steps, of two batches each; rank 1 has trained before."""
    model, head = learned(), nn.Linear(2, 2)
    for _ in range(rank):
        torch.optim.SGD(head.parameters(), 0.1).step()
    wrapped, optimizer, found = DistributedDataParallel(model), sgd(model), []
    for i in range(3):
        optimizer.zero_grad()
        for place in range(2):
            loss_of(wrapped, batches()[(4 * i + 2 * place + rank) % BATCHES]).backward()
            variance = model.get_submodule("bn")._variance_of_step.clone()
            found.append({"variance": variance, "scale": model.get_submodule("conv.weight_quantizer").scale.clone()})
        optimizer.step()
    return found


def observed(model: nn.Module) -> Tensor:
    return torch.stack(model.get_submodule("activation_quantizers.x").observer.range()).clone()


def in_phases(rank: int, size: int, observer: str) -> dict[str, Tensor]:
    """The scales of the inputs after a phase that observes."""
    torch.manual_seed(0)
    model = quantized("graph", "fixed", observer=observer)
    wrapped = DistributedDataParallel(model)
    schedule, optimizer = qt.tuning.QuantizationSchedule(wrapped, observe=BATCHES // size), sgd(model)
    for i in range(BATCHES // size):
        step(wrapped, optimizer, batches()[i * size + rank])
        schedule.step()
    return {"activation_quantizers.x": ranges(model)["activation_quantizers.x"]}


def refusal() -> str:
    """The error of ranges that cannot be kept equal."""
    try:
        qt.synchronize_ranges(observing("histogram"))
    except ValueError as error:
        return str(error)
    return ""


# ---- checkpoints


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(qt.parameter_groups(model, lr=1e-2))


def sharded_model() -> nn.Module:
    return fully_shard(learned())


def frozen_and_sharded(model: nn.Module) -> nn.Module:
    """A sharded model whose batch norms do not take other statistics on each rank."""
    qt.freeze_batch_norm(model)
    return fully_shard(model)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rank: int = 0) -> None:
    """Steps on data of one seed for each step and rank."""
    for i in steps:
        step(model, optimizer, batches()[(i + rank) % BATCHES] + torch.rand(()))


def full(model: nn.Module) -> dict[str, Tensor]:
    """The state dict with whole tensors."""
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
        for name, value in model.state_dict().items()
    }


def resumed(rank: int, folder: Path, wrap: Callable[[nn.Module], nn.Module], name: str) -> dict[str, Any]:
    """The states of a training without a break, and of one that is saved and resumed."""
    torch.manual_seed(rank)
    one = wrap(learned())
    torch.manual_seed(rank)
    optimizer = adam(inner(one))
    train(one, optimizer, range(2), rank)
    qt.save_checkpoint(one, folder / name, optimizer, {"rate": torch.optim.lr_scheduler.ConstantLR(optimizer)})
    train(one, optimizer, range(2, 4), rank)

    other = wrap(quantized("graph", "lsq"))
    again = adam(inner(other))
    found = qt.load_checkpoint(other, folder / name, again)
    train(other, again, range(2, 4), rank)
    return {"one": full(inner(one)), "other": full(inner(other)), "random": found.random}


def inner(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model


def errors(rank: int, folder: Path) -> list[str]:
    """What each rank is told where only one of them fails, or one file cannot hold the shards."""
    found = []
    missing = folder / "none.safetensors" if rank == 1 else folder / "ddp.safetensors"
    for call in (
        lambda: qt.load_checkpoint(learned(), missing),
        lambda: qt.save_checkpoint(learned(), folder / "x.safetensors", state={"a": {1} if rank == 0 else 1}),
        lambda: qt.save_checkpoint(learned(), "/proc/none/x.safetensors"),
        lambda: qt.save_checkpoint(learned(), "/proc/none/x"),
        lambda: qt.save_checkpoint(sharded_model(), folder / "x.safetensors"),
        lambda: qt.load_checkpoint(sharded_model(), folder / "float.pt"),
    ):
        try:
            call()
            found.append("")
        except Exception as error:
            found.append(str(error))
    return found


def saved_by_four(folder: Path) -> dict[str, Any]:
    """Train a sharded model, save it, and train it on."""
    torch.manual_seed(0)
    model = sharded_model()
    optimizer = adam(model)
    train(model, optimizer, range(2))
    qt.save_checkpoint(model, folder / "sharded", optimizer)
    saved = full(model)
    torch.manual_seed(7)
    train(model, optimizer, range(2, 4))
    return {"saved": saved, "trained": full(model)}


def loaded_by_two(folder: Path) -> dict[str, Any]:
    """Load what four have saved, and train it on; load the float model's file into shards."""
    model = fully_shard(quantized("graph", "lsq"))
    optimizer = adam(model)
    found = qt.load_checkpoint(model, folder / "sharded", optimizer)
    saved = full(model)
    torch.manual_seed(7)
    train(model, optimizer, range(2, 4))
    floats = fully_shard(quantized("graph", "fixed"))
    qt.load_checkpoint(floats, folder / "float.pt")
    return {"saved": saved, "trained": full(model), "random": found.random, "float": full(floats), "eval": in_eval()}


def in_eval() -> dict[str, bool]:
    """Whether a sharded model computes in eval mode what the same model does: its ranges follow the trained weights."""
    return {quantizer: _same_in_eval(quantizer) for quantizer in ("fixed", "lsq")}


def _same_in_eval(quantizer: str) -> bool:
    results = []
    for model in (learned("graph", quantizer), fully_shard(learned("graph", quantizer))):
        step(model, torch.optim.SGD(model.parameters(), 0.05), batches()[0])
        results.append(model.eval()(images()))
    return torch.equal(*results)


def work(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store{size}", rank=rank, world_size=size)
    result: dict[str, Any] = {"calibrated": calibrated_by_a_sharded_loader(rank, size)}
    result["blocks"] = {
        (observer, idle): calibrated_in_a_block(rank, size, observer, idle)
        for observer in ("minmax", "histogram")
        for idle in (False, True)
    }
    result["phases"] = {observer: in_phases(rank, size, observer) for observer in OBSERVERS}
    if size == 4:
        result |= saved_by_four(Path(folder))
    else:
        result["moving"] = {each: moving(rank, *each) for each in ((1, True), (2, False))}
        result["accumulated"] = accumulated(rank)
        result["refusal"] = refusal()
        wrappers = {
            "ddp": DistributedDataParallel,
            "ddp.safetensors": DistributedDataParallel,
            "fsdp": frozen_and_sharded,
        }
        result["resumed"] = {name: resumed(rank, Path(folder), wrap, name) for name, wrap in wrappers.items()}
        result["errors"] = errors(rank, Path(folder))
        result |= loaded_by_two(Path(folder))
    torch.save(result, Path(folder) / f"{size}.{rank}.pt")
