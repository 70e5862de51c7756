"""What each process of a group of two does for tests/frameworks/test_ultralytics.py; the results are left in files."""

from pathlib import Path

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import qtoolkit as qt

SIZE = 2


def work(rank: int, folder: str) -> None:
    from ultralytics.cfg import get_cfg
    from ultralytics.nn.tasks import DetectionModel

    from qtoolkit.integrations.ultralytics import quantize

    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    torch.manual_seed(0)
    model = quantize(DetectionModel("yolov8n.yaml", nc=2, verbose=False), backend="onnxruntime")
    model.args = get_cfg()
    images = torch.rand(2 * SIZE, 3, 64, 64, generator=torch.Generator().manual_seed(1))[rank::SIZE] * (rank + 1)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True, forward_sync_buffers=False)
    qt.calibrate(model, [images], progress=False)
    result = {"scales": {name: quantizer.scale.clone() for name, quantizer in qt.quantizers_of(model).items()}}
    result["start"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    batch = {"img": images, "batch_idx": torch.tensor([0.0, 1.0]), "cls": torch.tensor([[0.0], [1.0]])}
    batch["bboxes"] = torch.tensor([[0.5, 0.5, 0.4, 0.4]]).repeat(2, 1)
    optimizer = torch.optim.SGD(nn.ParameterList(p for p in model.parameters() if p.requires_grad), lr=1e-2)
    loss, _ = wrapped(batch)
    loss.sum().backward()
    optimizer.step()
    result["trained"] = {name: p.detach().clone() for name, p in model.named_parameters()}
    torch.save(result, Path(folder) / f"{rank}.pt")
