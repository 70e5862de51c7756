"""What each process of a group of two does for tests/test_promises.py; the results are left in files."""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import qtoolkit as qt

SIZE = 2
SHAPE = (3, 8, 8)
OBSERVERS = ("minmax", "histogram", "moving_average", "clip_std", "lsq", "moving_histogram", "pow2", "pow2_mode")


class Plain(nn.Module):
    """Layers without batch norm, so that a step on two halves of a batch is one on the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(3, 6, 3, padding=1), nn.ConvTranspose2d(6, 4, 2, stride=2)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.up(torch.relu(self.conv(x))).mean((2, 3)))


def data() -> Tensor:
    """Images that are larger from one to the next, so that ranks see different ranges."""
    images = torch.randn(8, *SHAPE, generator=torch.Generator().manual_seed(1))
    return images * torch.arange(1, 9).view(8, 1, 1, 1)


def prepared(observer: str = "minmax", quantizer: str = "fixed") -> nn.Module:
    torch.manual_seed(0)
    activation = qt.QuantSpec(observer=observer, quantizer=quantizer, pow2_scale=observer.startswith("pow2"))
    mapping = qt.QConfigMapping().set_global(qt.QConfig(activation, qt.QuantSpec(axis=0, quantizer=quantizer)))
    return qt.prepare(Plain().train(), backend="onnxruntime", qconfig_mapping=mapping)


def calibrated_scales(observer: str, images: Tensor, **options: Any) -> dict[str, Tensor]:
    """Scales after calibration, an image a batch: a convolution's sums may depend on the size of a batch."""
    model = prepared(observer)
    qt.calibrate(model, images.split(1) if len(images) else [], progress=False, **options)
    return {name: quantizer.scale for name, quantizer in qt.quantizers_of(model).items()}


def step(model: nn.Module, images: Tensor) -> None:
    """One step of SGD on a mean over the images."""
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    model.train()(images).square().mean().backward()
    optimizer.step()


def trained() -> nn.Module:
    """A calibrated model with learned scales, for one step."""
    model = prepared(quantizer="lsq")
    qt.calibrate(model, data().split(1), progress=False, synchronize=False)
    return model


def sync_batch_norm(rank: int) -> dict[str, Any]:
    """Train and evaluate with SyncBatchNorm on the CPU: what differs from a batch norm on all data."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU())
    models = plain, nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(plain))
    plain, sync = (qt.prepare(model.train(), backend="onnxruntime") for model in models)
    for model in (plain, sync):
        qt.calibrate(model, [data()], progress=False, synchronize=False)
    equal = torch.equal(sync.eval()(data()), plain.eval()(data()))
    trained, wanted = sync.train()(data()[rank::SIZE]), plain.train()(data())[rank::SIZE]
    return {"equal in eval": equal, "in training": float((trained - wanted).abs().max())}


def sharded() -> dict[str, Any]:
    """Three steps with fully_shard and without, on the same data: what differs in the parameters."""
    torch.manual_seed(0)
    spec = qt.QuantSpec(quantizer="lsq")
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, qt.QuantSpec(axis=0, quantizer="lsq")))
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3))
    one = qt.prepare(model.train(), backend="onnxruntime", qconfig_mapping=mapping)
    qt.calibrate(one, [data()], progress=False, synchronize=False)
    one.train()
    several = fully_shard(copy.deepcopy(one))
    for each in (one, several):
        optimizer = torch.optim.SGD(each.parameters(), 0.05)
        for images in data().split(4):
            optimizer.zero_grad()
            each(images / 4).square().mean().backward()
            optimizer.step()
    several.unshard()
    pairs = zip(one.named_parameters(), several.parameters(), strict=True)
    return {name: torch.equal(p.detach(), q.detach()) for (name, p), q in pairs}


def replaced(quantizer: str = "fixed") -> nn.Module:
    """A calibrated model whose layers quantize their own inputs."""
    torch.manual_seed(0)
    spec = qt.QuantSpec(quantizer=quantizer)
    mapping = qt.QConfigMapping().set_global(qt.QConfig(spec, spec))
    return qt.quant_modules.replace(Plain().train(), mapping, backend="tensorrt10")


def work_replaced(rank: int, folder: str) -> None:
    """Calibrate a replaced model on each rank's share of the data, and train it for one step."""
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    images, model, trained = data()[rank::SIZE], replaced(), replaced("lsq")
    qt.calibrate(model, images.split(1), progress=False)
    qt.calibrate(trained, data().split(1), progress=False, synchronize=False)
    step(DistributedDataParallel(trained), images)
    scales = {name: quantizer.scale for name, quantizer in qt.quantizers_of(model).items()}
    torch.save({"scales": scales, "trained": trained.state_dict()}, Path(folder) / f"{rank}.pt")


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    images = data()[rank::SIZE]
    result: dict[str, Any] = {name: calibrated_scales(name, images) for name in OBSERVERS}
    result["a rank without data"] = calibrated_scales("histogram", data() if rank else data()[:0])
    result["alone"] = calibrated_scales("minmax", images, synchronize=False)
    model = trained()
    step(DistributedDataParallel(model), images)
    result["trained"] = model.state_dict()
    result["sync"] = sync_batch_norm(rank)
    result["sharded"] = sharded()
    torch.save(result, Path(folder) / f"{rank}.pt")
