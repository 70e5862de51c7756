"""What each process of a group of two does for tests/distributed/test_sync_batch_norm.py; the results are left in files."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import qtoolkit as qt
from qtoolkit.nn.batch_norm import linked, process_group_of
from tests.blocks import called_one_by_one
from tests.cases import floats
from tests.copies import made_once
from tests.graph.program.test_unit import counted, network
from tests.nets import settled

SIZE, STEPS = 2, 2
FIXED, LSQ = qt.QuantSpec(signed=False, symmetric=False), qt.QuantSpec(quantizer="lsq")


def images() -> Tensor:
    return torch.randn(8, 8, 8, 8, generator=torch.Generator().manual_seed(2)) + 1


def share(x: Tensor, rank: int, counts: tuple[int, ...]) -> Tensor:
    return x.split(list(counts))[rank]


def network_of(change: Callable[[nn.Module], object] | None = None) -> nn.Module:
    model = network()
    for module in model.modules():
        if change is not None and isinstance(module, nn.modules.batchnorm._BatchNorm):
            change(module)
    return model


def not_affine(bn: nn.Module) -> None:
    bn.affine, bn.weight, bn.bias = False, None, None


def without_statistics(bn: nn.Module) -> None:
    bn.track_running_stats = False


def cumulative(bn: nn.Module) -> None:
    bn.momentum = None


Case = tuple[dict[str, Any], Callable[[nn.Module], object] | None]
"""Options of `prepared_of`, and what changes each batch norm."""

CASES: dict[str, Case] = {
    "fixed": ({}, None),
    "learned": ({"activation": LSQ, "weight": qt.QuantSpec(axis=0, quantizer="lsq")}, None),
    "on codes": ({"arithmetic": "integer"}, None),
    "learned, on codes": ({"activation": LSQ, "weight": LSQ, "arithmetic": "integer"}, None),
    "channels_last": ({"last": True}, None),
    "converted": ({"after": True}, None),
    "float64": ({"dtype": torch.float64}, None),
    "without weights": ({}, not_affine),
    "without statistics": ({}, without_statistics),
    "cumulative": ({}, cumulative),
    "one image": ({"counts": (7, 1)}, None),
    "no image": ({"counts": (8, 0)}, None),
}


@made_once
def prepared_of(name: str, sync: bool) -> nn.Module:
    """Return the prepared network of a case, calibrated on all images; `sync`: with SyncBatchNorm."""
    options, change = CASES[name]
    mapping = qt.QConfigMapping().set_global(
        qt.QConfig(options.get("activation", FIXED), options.get("weight", qt.QuantSpec(axis=0)))
    )

    def prepared(model: nn.Module) -> nn.Module:
        arithmetic = options.get("arithmetic", "float")
        return qt.prepare(model, qconfig_mapping=mapping, backend="academic", training_arithmetic=arithmetic)

    model = prepared(network_of(change))
    qt.calibrate(model, [images()], progress=False, synchronize=False)  # a SyncBatchNorm keeps its running statistics
    if sync and options.get("after", False):
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif sync:
        calibrated = model.state_dict()
        model = prepared(nn.SyncBatchNorm.convert_sync_batchnorm(network_of(change)))
        model.load_state_dict(calibrated)
    return settled(model).train().to(options.get("dtype", torch.float32))


def steps(name: str, model: nn.Module, rank: int | None, own: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Return the results and gradients of some steps of SGD on the sum over all images, and all buffers afterwards.

    Args:
        name: The name of the case.
        model: What is trained.
        rank: The rank, which has its share of the images; None for a process with all of them.
        own: Gets the gradients of the rank alone.
    """
    options, _ = CASES[name]
    found: dict[str, Tensor] = {}
    counts = options.get("counts", (3, 5))
    for step in range(STEPS):
        x, weights = images().to(options.get("dtype", torch.float32)), torch.linspace(-1, 2, 24).view(8, 3)
        if rank is not None:
            x, weights = share(x, rank, counts), share(weights, rank, counts)
        if options.get("last", False):
            x = x.contiguous(memory_format=torch.channels_last)
        x = (x * (1 + step)).requires_grad_()
        model.zero_grad()
        y = model(x)
        (y * weights).sum().backward()
        found |= {f"y {step}": y.detach(), f"x {step}": x.grad}
        for each, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if own is not None:
                own[f"{step} {each}"] = parameter.grad.clone()
            if rank is not None:
                distributed.all_reduce(parameter.grad)
            found[f"{step} {each}"] = parameter.grad.clone()
            parameter.data -= 1e-3 * parameter.grad
    return found | {f"buffer {each}": buffer.clone() for each, buffer in model.named_buffers()}


def trained(rank: int, name: str) -> dict[str, Any]:
    """Train a case by its units and with all modules called one by one."""
    found: dict[str, Any] = {}
    for route in ("units", "one by one"):
        model = prepared_of(name, sync=True)
        with counted(pytest.MonkeyPatch()) as calls, called_one_by_one() if route == "one by one" else nullcontext():
            found[route] = steps(name, model, rank, found.setdefault(f"{route} own", {}))
        found[f"{route} by op"] = calls["by_op"]
        found[f"{route} in eval"] = model.eval()(images().to(next(model.parameters()).dtype)).detach()
        found[f"{route} state"] = model.state_dict()
    return found


def watched_on_one_rank(rank: int) -> dict[str, Tensor]:
    """Train with a hook on rank 0 alone, where that calls a batch norm, a layer or all modules one by one."""
    found: dict[str, Tensor] = {}
    for name in ("second.1", "second.0", None):
        model = prepared_of("fixed", sync=True)
        if rank == 0 and name is not None:
            model.get_submodule(name).register_forward_hook(lambda module, args, output: None)
        with called_one_by_one() if rank == 0 and name is None else nullcontext():
            found |= {f"{name} {key}": value for key, value in steps("fixed", model, rank).items()}
    return found


def alone_again(rank: int) -> dict[str, Tensor]:
    """Train in the group, and on rank 0 when there is no group any more: the last results."""
    model = prepared_of("fixed", sync=True)
    steps("fixed", model, rank)
    if rank:
        return {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distributed, "is_initialized", lambda: False)
        one = model(images())
        with called_one_by_one():
            return {"units": one.detach(), "one by one": model(images()).detach()}


def compiled(rank: int) -> dict[str, Tensor]:
    """Train one step compiled as a whole."""
    found: dict[str, Tensor] = {}
    for name in ("eager", "compiled"):
        model = prepared_of("fixed", sync=True)
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if name == "compiled" else model
        x = share(images(), rank, (3, 5)).requires_grad_()
        y = run(x)
        y.sum().backward()
        found |= {f"{name} y": y.detach(), f"{name} x": x.grad}
        found |= {f"{name} {each}": buffer for each, buffer in model.named_buffers()}
    return found


def sharded(rank: int) -> dict[str, Tensor]:
    """Train one step with sharded parameters, whose gradients torch averages, and with whole ones."""
    found: dict[str, Tensor] = {}
    for name in ("whole", "sharded"):
        model = prepared_of("learned", sync=True)
        if name == "sharded":
            fully_shard(model, mesh=init_device_mesh("cpu", (SIZE,)))
        y = model(share(images(), rank, (3, 5)))
        y.square().sum().backward()
        found[f"{name} y"] = y.detach()
        for each, parameter in model.named_parameters():
            if parameter.grad is None:
                continue
            if name == "sharded":
                found[f"{name} {each}"] = parameter.grad.full_tensor()
            else:
                distributed.all_reduce(parameter.grad)
                found[f"{name} {each}"] = parameter.grad / SIZE
        found |= {f"{name} {each}": buffer for each, buffer in model.named_buffers()}
    return found


def in_groups(rank: int) -> dict[str, Any]:
    """What a batch norm says of its group, and its results, in a group of one rank and in one of all."""
    groups = [distributed.new_group([each]) for each in range(SIZE)]
    both = distributed.new_group(list(range(SIZE)))
    found: dict[str, Any] = {}
    for name, group in (("one", groups[rank]), ("all", both), ("default", None)):
        model = qt.prepare(network(), backend="academic")
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model, group).train()
        bn = model.get_submodule("stem.1")
        found[name] = {
            "shared": process_group_of(bn) is not None,
            "same": (group or distributed.group.WORLD).group_name == process_group_of(bn),
            "report": next(
                str(line.training) for line in qt.quantization_report(model).layers if line.name == "stem.1"
            ),
        }
        if name != "one":
            bn(share(images(), rank, (3, 5)))
            found[name]["mean"] = bn.running_mean
    return found


def replaced(rank: int | None) -> dict[str, Tensor]:
    """A step of a replaced model, whose layers and batch norms are modules."""
    pairs = [["stem.0", "stem.1"], ["first.0", "first.1"], ["second.0", "second.1"], ["down.0", "down.1"]]
    mapping = qt.QConfigMapping().set_global(qt.QConfig(FIXED, qt.QuantSpec(axis=0)))

    def replaced(model: nn.Module) -> nn.Module:
        model.head = nn.Flatten()
        return qt.quant_modules.replace(model, mapping, backend="academic")

    model = replaced(qt.fuse_modules(network(), pairs))
    qt.calibrate(model, [images()], progress=False, synchronize=False)
    if rank is not None:
        calibrated = model.state_dict()
        model = replaced(nn.SyncBatchNorm.convert_sync_batchnorm(qt.fuse_modules(network(), pairs)))
        model.load_state_dict(calibrated)
    x = (images() if rank is None else share(images(), rank, (3, 5))).requires_grad_()
    y = settled(model).train()(x)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, **{f"buffer {n}": b.clone() for n, b in model.named_buffers()}}


def operands() -> tuple[Tensor, ...]:
    """The input of a batch norm, a residual, and the gradient of the result."""
    x, residual, grad = (floats(torch.float32, seed)(8, 5, 6, 7) for seed in (1, 2, 3))
    return x * 3 + 20, residual / 3, grad


def one_op(rank: int | None) -> dict[str, Tensor]:
    """A batch norm with a residual, ReLU and a quantizer by the op, and all that the op gives."""
    x, residual, grad = operands()
    if rank is not None:
        x, residual, grad = (share(t, rank, (1, 7)).contiguous() for t in (x, residual, grad))
    weight, bias, divisor = torch.linspace(-1, 2, 5), torch.linspace(0, 1, 5), torch.linspace(1, -2, 5)
    given = [x, weight, bias, divisor, residual, torch.tensor(0.05), torch.tensor(7.0)]
    given = [t.clone().requires_grad_() for t in given]
    name = None if rank is None else distributed.group.WORLD.group_name
    totals = None if rank is None else qt.ops.batch_norm_totals(x, name, divisor=divisor)
    grid = {"scale": given[5], "zero_point": given[6], "qmin": 0, "qmax": 100}
    y, codes, mean, variance = qt.ops.batch_norm_fake_quant(
        *given[:3], divisor=given[3], residual=given[4], low=0.0, **grid, totals=totals, process_group=name
    )
    y.backward(grad)
    names = ("x", "weight", "bias", "divisor", "residual", "scale", "zero_point")
    found = {name: t.grad for name, t in zip(names, given, strict=True)}
    own = found["divisor"].clone()
    if rank is not None:
        for each in ("weight", "bias", "divisor", "scale", "zero_point"):
            distributed.all_reduce(found[each])
    return {**found, "own divisor": own, "y": y.detach(), "codes": codes, "mean": mean, "variance": variance}


def work(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    result: dict[str, Any] = {name: trained(rank, name) for name in CASES}
    result["watched"] = watched_on_one_rank(rank)
    result["alone"] = alone_again(rank)
    result["compiled"] = compiled(rank)
    result["sharded"] = sharded(rank)
    result["groups"] = in_groups(rank)
    result["replaced"] = replaced(rank)
    result["op"] = one_op(rank)
    torch.save(result, Path(folder) / f"{rank}.pt")


def of_module(bn: nn.Module, rank: int, counts: tuple[int, ...]) -> dict[str, Tensor]:
    """Two steps of a batch norm on a GPU."""
    x, _, grad = (share(t, rank, counts).cuda() for t in operands())
    found: dict[str, Tensor] = {}
    bn = bn.cuda().train()
    for step in range(2):
        bn.zero_grad()
        given = (x * (1 + step)).requires_grad_()
        y = bn(given)
        y.backward(grad)
        found |= {f"y {step}": y.detach(), f"x {step}": given.grad}
        found |= {f"{step} {name}": p.grad.clone() for name, p in bn.named_parameters()}
    return {name: t.cpu() for name, t in {**found, **dict(bn.named_buffers())}.items()}


def work_on_gpu(rank: int, folder: str) -> None:
    """This module beside torch's, on one GPU with gloo."""
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    result: dict[str, Any] = {}
    for counts in ((3, 5), (8, 0)):
        for momentum in (0.1, None):
            pair = [nn.SyncBatchNorm(5, momentum=momentum) for _ in range(2)]
            named = {"torch": pair[0], "ours": linked(pair[1], "unscale", "bn")}
            result[f"{counts} {momentum}"] = {name: of_module(bn, rank, counts) for name, bn in named.items()}
    torch.save(result, Path(folder) / f"{rank}.pt")
