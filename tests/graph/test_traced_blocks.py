"""The blocks of a prepared model can be read as before; what would have no effect on them is refused."""

import copy
import pickle

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)

import qtoolkit as qt
from qtoolkit.graph.traced_blocks import TracedBlock


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stride, self.downsample, self.hidden = (1, 1), None, object()
        self.conv, self.bn, self.relu = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.bn(self.conv(x))) + x


class Stages(nn.Module):
    """Stages that are not called in the order of their containers."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleDict({"b": nn.Conv2d(4, 2, 1), "a": nn.Conv2d(4, 3, 1)})
        self.stem = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4), nn.ReLU())
        self.blocks = nn.ModuleList([Block(), Block(), nn.Identity()])
        self.unused = nn.Sequential(nn.Conv2d(4, 4, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.blocks[0](self.blocks[1](self.stem(x)))
        return self.heads["a"](x), self.heads["b"](x)


X = torch.randn(1, 4, 8, 8)


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("measured", [True, False], ids=["sized", "plain"])
def test_containers_keep_their_kinds_and_orders(training: bool, measured: bool) -> None:
    model = Stages().train(training)
    prepared = qt.prepare(model, (X,) if measured else None, "onnxruntime")
    qt.calibrate(prepared, [X], progress=False)
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), qt.convert(prepared)):
        for part, kind in ((ours.stem, nn.Sequential), (ours.blocks, nn.ModuleList), (ours.heads, nn.ModuleDict)):
            assert isinstance(part, kind)
        assert (len(ours.stem), len(ours.blocks), list(ours.heads)) == (3, 3, ["b", "a"])
        assert [type(part).__name__ for part in (ours.stem[0], ours.stem[2])] == ["QuantConv2d", "ReLU"]
        assert ours.blocks[1].conv is ours.get_submodule("blocks.1.conv")
        assert [block.conv for block in ours.blocks[:2]] == [ours.blocks[0].conv, ours.blocks[1].conv]
        assert (ours.blocks[0].stride, ours.blocks[0].downsample) == ((1, 1), None)
        assert not hasattr(ours.blocks[0], "hidden")
        assert ours.heads["a"].out_channels == 3
        assert "x Block(" in repr(ours.blocks)
    names = [name for name, _ in model.named_parameters()]
    kept = [name for name in names if training or (".bn." not in name and "stem.1" not in name)]
    assert [name for name, _ in prepared.named_parameters()] == kept


def test_a_block_cannot_be_called() -> None:
    prepared = qt.prepare(Stages())
    for name, kind in (("stem", "Sequential"), ("blocks.0", "Block")):
        with pytest.raises(
            RuntimeError, match=rf"a {kind} of a prepared model cannot be called on its own.*prepare\(\.\.\., skip="
        ):
            prepared.get_submodule(name)(X)


@pytest.mark.parametrize(
    "register", ["forward_pre_hook", "forward_hook", "full_backward_hook", "full_backward_pre_hook"]
)
def test_a_block_takes_no_hooks(register: str) -> None:
    prepared = qt.prepare(Stages())
    with pytest.raises(RuntimeError, match="a Block of a prepared model cannot be given hooks"):
        getattr(prepared.blocks[0], f"register_{register}")(lambda *args: None)
    getattr(prepared.blocks[0].conv, f"register_{register}")(lambda *args: None)


def test_a_block_cannot_be_wrapped() -> None:
    prepared = qt.prepare(Stages())
    with pytest.raises(RuntimeError, match="replaced or wrapped, here '0' by a CheckpointWrapper"):
        apply_activation_checkpointing(prepared, check_fn=lambda module: type(module) is TracedBlock)
    with pytest.raises(RuntimeError, match="replaced or wrapped, here 'stem' by a Sequential"):
        prepared.stem = nn.Sequential(nn.Identity())
    with pytest.raises(RuntimeError, match="replaced or wrapped, here '1' by a CheckpointWrapper"):
        prepared.blocks[1] = checkpoint_wrapper(prepared.blocks[1])


def test_a_block_cannot_be_sharded_alone() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="a Block of a prepared model cannot be given hooks, as sharding"):
            fully_shard(qt.prepare(Stages()).blocks[0], mesh=init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()


def test_the_remedy_works() -> None:
    model = Stages().train()
    prepared = qt.prepare(model, (X,), "onnxruntime", skip=["blocks.0", "blocks.1"])
    qt.calibrate(prepared, [X], progress=False)
    expected = prepared(X)
    apply_activation_checkpointing(prepared, check_fn=lambda module: isinstance(module, Block))
    for ours, theirs in zip(prepared(X), expected, strict=True):
        torch.testing.assert_close(ours, theirs)
    sum(y.sum() for y in prepared(X)).backward()
    assert prepared.get_parameter("blocks.0._checkpoint_wrapped_module.conv.weight").grad is not None


def test_layers_can_be_replaced() -> None:
    model = Stages().eval()
    prepared = qt.prepare(model, (X,))
    model.blocks[0].relu = prepared.blocks[0].relu = nn.Tanh()
    nets_equal = [torch.allclose(a, b, atol=1e-5) for a, b in zip(off(prepared), model(X), strict=True)]
    assert nets_equal == [True, True]


def off(model: nn.Module) -> tuple[Tensor, ...]:
    with qt.disable_quantization(model):
        return model(X)
