"""A training of some output channels: what moves and what stays, on both routes, resumed, accumulated, in two processes."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.nn import QuantWeighted
from tests import processes
from tests.blocks import called_one_by_one
from tests.training.nets import ROUTES, learned, loss_of, step
from tests.tuning.test_schedule import batch, same

Updates = qt.tuning.PartialUpdates
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, weight_decay=0.1),
    "plain sgd": lambda p: torch.optim.SGD(p, 0.05),
    "adam": lambda p: torch.optim.Adam(p, 0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, foreach=False),
    "fused": lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.1, fused=True),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
each_route = pytest.mark.parametrize("route", ROUTES)


def layers_of(model: nn.Module) -> dict[str, QuantWeighted]:
    return {name: m for name, m in model.named_modules() if isinstance(m, QuantWeighted)}


def chosen(model: nn.Module) -> dict[str, list[int]]:
    """The channels that each layer updates."""
    return {name: m.updated_channels.tolist() for name, m in layers_of(model).items() if m.updated_channels is not None}


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: Updates, steps: int) -> None:
    for _ in range(steps):
        step(model, optimizer, batch(updates.steps))
        updates.step()


@each_route
@each_optimizer
def test_other_channels_neither_move_nor_decay_and_all_else_trains(route: str, optimizer: Any) -> None:
    model = learned(route)
    opt = optimizer(model.parameters())
    updates = Updates(model, opt, share=0.25, every=10)
    before = copy.deepcopy(model.state_dict())
    train(model, opt, updates, 3)
    for _, layer in layers_of(model).items():
        assert layer.updated_channels is not None
        assert len(layer.updated_channels) == max(1, layer.channels() // 4)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() != before[name]).flatten(1).any(1) if parameter.dim() > 1 else None
        if moved is not None:
            assert moved.nonzero().flatten().tolist() == chosen(model)[name.removesuffix(".weight")]
        elif "gamma" not in name and not name.endswith("conv.bias"):
            assert (parameter.detach() != before[name]).any(), name


@each_optimizer
def test_the_first_step_of_chosen_channels_is_the_whole_trainings(optimizer: Any) -> None:
    models = [learned(), learned()]
    optimizers = [optimizer(model.parameters()) for model in models]
    Updates(models[1], optimizers[1], share=0.5)
    for model, opt in zip(models, optimizers, strict=True):
        step(model, opt, batch(0))
    for name, channels in chosen(models[1]).items():
        whole, part = (model.get_parameter(f"{name}.weight") for model in models)
        size = whole.grad[channels].abs()
        counts = size > 1e-4 * size.max()  # Adam makes a step of each gradient, of rounding errors too
        torch.testing.assert_close(
            part.detach()[channels][counts], whole.detach()[channels][counts], rtol=1e-4, atol=1e-5
        )


@each_optimizer
def test_the_state_of_other_channels_stays(optimizer: Any) -> None:
    model = learned()
    opt = optimizer(model.parameters())
    train(model, opt, Updates(model, opt, share=0.5, every=1, by="rotation"), 2)  # both halves
    before = copy.deepcopy(opt.state_dict()["state"])
    step(model, opt, batch(5))
    place = [name for name, _ in model.named_parameters()].index("stem.weight")
    for key, value in opt.state_dict()["state"].get(place, {}).items():
        if value.dim() > 1:
            moved = (value != before[place][key]).flatten(1).any(1).nonzero().flatten().tolist()
            assert set(moved) <= set(chosen(model)["stem"]), key
            assert value.shape == model.get_parameter("stem.weight").shape


def test_rules_of_choice() -> None:
    model = learned()
    weight = model.get_parameter("stem.weight")
    with torch.no_grad():
        weight.copy_(torch.arange(1.0, 9.0).view(-1, 1, 1, 1).expand_as(weight) / 8)
    opt = OPTIMIZERS["sgd"](model.parameters())
    updates = Updates(model, opt, share=0.25)
    assert chosen(model)["stem"] == [6, 7]
    updates.finish()
    assert not chosen(model)
    updates = Updates(model, opt, share=0.25, every=1, by="rotation")
    seen = []
    for _ in range(4):
        seen += chosen(model)["stem"]
        updates.step()
    assert sorted(seen) == list(range(8))
    updates.finish()
    updates = Updates(model, opt, share=0.25, by="network")
    assert sum(map(len, chosen(model).values())) == 2 + 2 + 1
    assert {6, 7} & set(chosen(model)["stem"])
    assert "by network" in repr(updates)


def test_shares_by_name_and_frozen_weights_cost_no_backward() -> None:
    model = learned()
    opt = OPTIMIZERS["sgd"](model.parameters())
    updates = Updates(model, opt, share={"conv": 0.5, "stem": 0})
    assert {name: len(c) for name, c in chosen(model).items()} == {"stem": 0, "conv": 4}
    before = copy.deepcopy(model.state_dict())
    train(model, opt, updates, 2)
    now = model.state_dict()
    assert torch.equal(now["stem.weight"], before["stem.weight"])
    assert (now["fc.weight"] != before["fc.weight"]).any(1).all()
    updates.finish()
    assert model.get_parameter("stem.weight").requires_grad
    step(model, opt, batch(1))
    assert (model.state_dict()["stem.weight"] != before["stem.weight"]).flatten(1).any(1).all()


@each_route
def test_one_op_and_ops_one_by_one_give_the_same_gradients(route: str) -> None:
    found = []
    for how in ("ops", "modules", "floats"):
        model = learned(route)
        Updates(model, OPTIMIZERS["sgd"](model.parameters()), share=0.25)
        if how == "floats":
            qt.nn.set_training_arithmetic(model, "float", "float")
        if how == "modules":
            with called_one_by_one():
                loss_of(model, batch(0)).backward()
        else:
            loss_of(model, batch(0)).backward()
        found.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, grad in found[0].items():
            torch.testing.assert_close(other[name], grad, rtol=1e-3, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("frozen", [False, True], ids=["batch statistics", "frozen"])
def test_gamma_of_other_channels_has_the_batch_norms_gradient_alone(frozen: bool) -> None:
    grads = {}
    for how in ("ops", "modules"):
        model = learned()
        if frozen:
            qt.freeze_batch_norm(model)
        Updates(model, OPTIMIZERS["sgd"](model.parameters()), share=0.25)
        if how == "modules":
            with called_one_by_one():
                loss_of(model, batch(0)).backward()
        else:
            loss_of(model, batch(0)).backward()
        grads[how] = model.get_parameter("bn.weight").grad
        others = torch.ones(8, dtype=torch.bool).index_fill(0, torch.tensor(chosen(model)["conv"]), False)
        assert bool(grads[how][others].any()) is not frozen
    torch.testing.assert_close(*grads.values(), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("by", ["magnitude", "network", "rotation"])
@each_optimizer
def test_a_resumed_training_goes_on_bit_for_bit(by: str, optimizer: Any) -> None:
    model = learned()
    opt = optimizer(model.parameters())
    updates = Updates(model, opt, share=0.25, every=2, by=by)
    train(model, opt, updates, 3)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": opt.state_dict(), "updates": updates.state_dict()}, file)
    train(model, opt, updates, 3)
    file.seek(0)
    state = torch.load(file)
    other = learned()
    again = optimizer(other.parameters())
    resumed = Updates(other, again, share=0.25, every=2, by=by)
    other.load_state_dict(state["model"])
    again.load_state_dict(state["optimizer"])
    resumed.load_state_dict(state["updates"])
    train(other, again, resumed, 3)
    same(model, other)
    assert chosen(model) == chosen(other)


def test_accumulated_and_checkpointed_steps_are_the_plain_ones() -> None:
    models = [learned() for _ in range(3)]
    for model in models:
        qt.freeze_batch_norm(model)
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    for model, opt in zip(models, optimizers, strict=True):
        Updates(model, opt, share=0.5)
    loss_of(models[0], batch(0)).backward()
    for half in batch(0).chunk(2):
        (loss_of(models[1], half) / 2).backward()
    checkpoint(models[2], batch(0), use_reentrant=False).float().square().mean().backward()
    for opt in optimizers:
        opt.step()
    for other in models[1:]:
        for one, two in zip(models[0].parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_a_compiled_training_is_the_plain_one() -> None:
    models = [learned(), learned()]
    optimizers = [OPTIMIZERS["sgd"](model.parameters()) for model in models]
    updates = [Updates(*pair, share=0.25, every=1, by="rotation") for pair in zip(models, optimizers, strict=True)]
    train(models[0], optimizers[0], updates[0], 3)
    train(torch.compile(models[1], backend="aot_eager", fullgraph=True), optimizers[1], updates[1], 3)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


def test_a_trained_model_converts_without_a_trace() -> None:
    model = learned()
    opt = OPTIMIZERS["sgd"](model.parameters())
    train(model, opt, Updates(model, opt), 2)
    converted = qt.convert(copy.deepcopy(model.eval()))
    torch.testing.assert_close(converted(batch(0)), model.eval()(batch(0)), rtol=1e-4, atol=1e-4)
    assert "updated_channels" not in "".join(name for name, _ in converted.named_buffers())
    assert not [name for name in model.state_dict() if "updated_channels" in name]


def test_a_copy_trains_whole_weights_and_may_be_trained_in_part() -> None:
    model = learned()
    opt = OPTIMIZERS["sgd"](model.parameters())
    updates = Updates(model, opt, share=0.25)
    train(model, opt, updates, 1)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert chosen(copied) == {}
        before = copy.deepcopy(copied.state_dict())
        step(copied, OPTIMIZERS["sgd"](copied.parameters()), batch(1))
        for name in layers_of(copied):
            moved = (copied.state_dict()[f"{name}.weight"] != before[f"{name}.weight"]).flatten(1).any(1)
            assert moved.all()
        again = OPTIMIZERS["sgd"](copied.parameters())
        train(copied, again, Updates(copied, again, share=0.25), 1)
    assert chosen(model)
    train(model, opt, updates, 1)


class Attends(nn.Module):
    """An attention whose query, key and value are one, two or three tensors, or that has a weight for each of them."""

    KINDS = ("one", "two", "three", "three weights")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        own = {"kdim": 6, "vdim": 5} if kind == "three weights" else {}
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True, **own)

    def forward(self, x: Tensor) -> Tensor:
        key = x if self.kind == "one" else x * 2
        value = key if self.kind in ("one", "two") else x - 1
        if self.kind == "three weights":
            key, value = key[..., :6], value[..., :5]
        y: Tensor = self.attention(x, key, value, need_weights=False)[0]
        return y


@each_route
@pytest.mark.parametrize("kind", Attends.KINDS)
@pytest.mark.parametrize("save", ["codes", "float"])
@pytest.mark.parametrize("by", ["magnitude", "network"])
def test_the_projections_of_an_attention_are_trained_in_part(route: str, kind: str, save: Any, by: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 5, 8)
    model = Attends(kind).train()
    if route == "graph":
        model = qt.prepare(model, (x,), backend="tensorrt")
    else:
        model = qt.quant_modules.replace(model, backend="tensorrt")
    qt.nn.set_training_arithmetic(model, "float", save)
    qt.calibrate(model, [x], progress=False)
    model.train()
    whole = copy.deepcopy(model)
    opt = torch.optim.SGD(model.parameters(), 0.1)
    updates = Updates(model, opt, share=0.25, by=by)
    assert not updates.skipped
    rows = updates.state_dict()["channels"]
    weights = ["q_proj_weight", "k_proj_weight", "v_proj_weight"] if kind == "three weights" else ["in_proj_weight"]
    assert list(rows) == [f"attention.{name}" for name in (*weights, "out_proj.weight")]
    if by == "magnitude":  # of each of query, key and value as many
        assert all(
            torch.div(each, 8, rounding_mode="floor").bincount().unique().tolist() == [2] for each in rows.values()
        )
    for each in (model, whole):
        each(x).square().sum().backward()
    for name, p in whole.named_parameters():
        found = model.get_parameter(name).grad
        wanted = p.grad
        if name in rows:
            wanted = torch.zeros_like(p).index_copy(0, rows[name], p.grad[rows[name]])
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5 * float(p.grad.abs().max()))
    opt.step()
    for name, channels in rows.items():
        moved = (model.get_parameter(name) != whole.get_parameter(name)).any(1)
        assert moved.nonzero().flatten().tolist() == channels.tolist()
    assert not any(getattr(copy.deepcopy(model).attention, name) is not None for name in ("updated_q", "updated_out"))
    updates.finish()
    assert model.attention.updated_out is None


def test_finish_puts_back_what_a_step_that_raises_holds_and_leaves_what_others_froze() -> None:
    model = learned()
    opt = OPTIMIZERS["sgd"](model.parameters())
    updates = Updates(model, opt)
    loss_of(model, batch(0)).backward()
    model.get_parameter("stem.weight").requires_grad_(False)
    rate = opt.param_groups[0].pop("lr")
    with pytest.raises(KeyError):
        opt.step()
    opt.param_groups[0]["lr"] = rate
    updates.finish()
    assert {id(p) for p in opt.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    assert set(opt.state) <= set(model.parameters())
    assert not model.get_parameter("stem.weight").requires_grad


def test_a_step_that_raises_leaves_the_model_as_it_is() -> None:
    model = learned()
    opt = OPTIMIZERS["sgd"](model.parameters())
    updates = Updates(model, opt)
    loss_of(model, batch(0)).backward()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="without a closure: it would run the model"):
        opt.step(lambda: 0.0)
    rate = opt.param_groups[0].pop("lr")
    with pytest.raises(KeyError):
        opt.step()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name])
    opt.param_groups[0]["lr"] = rate
    opt.step()
    updates.step()
    assert not torch.equal(model.state_dict()["fc.weight"], before["fc.weight"])
    assert {id(p) for p in opt.param_groups[0]["params"]} == {id(p) for p in model.parameters()}
    assert set(opt.state) <= set(model.parameters())


def test_what_is_trained_whole_is_named() -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    model = qt.quant_modules.replace(model, backend="onnxruntime").train()
    model.get_parameter("1.weight").requires_grad_(False)
    others = [p for name, p in model.named_parameters() if name != "2.weight"]
    updates = Updates(model, torch.optim.SGD(others, 0.1), share=0.5)
    reasons = {"1": "its weight is not trained", "2": "its weight is not in the optimizer"}
    assert {name: updates.skipped[name] for name in reasons} == reasons
    with pytest.raises(ValueError, match=r"no layer can be trained in part \(.*3: another PartialUpdates trains it"):
        Updates(model, torch.optim.SGD(others, 0.1), share=0.5)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"share": 1.5}, ValueError, r"share must lie in \[0, 1\], got 1.5"),
        ({"share": "a"}, TypeError, "share must be a number from 0 to 1, got 'a'"),
        ({"share": {"stam": 0.5}}, ValueError, "unknown module 'stam'; did you mean 'stem'"),
        ({"share": 1}, ValueError, "no layer can be trained in part"),
        ({"every": 0}, ValueError, "every must be"),
        ({"by": "size"}, ValueError, "unknown PartialUpdates: by 'size'"),
        (
            {"optimizer": torch.optim.RMSprop},
            ValueError,
            "optimizer must be torch's SGD, Adam or AdamW, .* got RMSprop",
        ),
        ({"model": 1}, TypeError, "PartialUpdates"),
    ],
)
def test_wrong_arguments_are_told_the_rule(change: dict[str, Any], error: type[Exception], words: str) -> None:
    model = learned()
    given: dict[str, Any] = {"model": model, "optimizer": torch.optim.SGD, **change}
    given["optimizer"] = given["optimizer"](model.parameters(), 0.1)
    with pytest.raises(error, match=words):
        Updates(**given)
    assert not chosen(model)


def test_a_state_of_another_training_is_refused() -> None:
    model = learned()
    opt = OPTIMIZERS["sgd"](model.parameters())
    updates = Updates(model, opt, share=0.5, every=1, by="rotation")
    state = updates.state_dict()
    train(model, opt, updates, 1)
    assert state["channels"]["stem"].tolist() == [0, 1, 2, 3] != chosen(model)["stem"]
    other = learned()
    updates = Updates(other, OPTIMIZERS["sgd"](other.parameters()), share=0.25)
    with pytest.raises(ValueError, match=r"the state has 4 channels of 'stem', but share=0\.25 gives 2"):
        updates.load_state_dict(state)
    state["channels"].pop("stem")
    with pytest.raises(ValueError, match="only one of the two has the weight 'stem'"):
        updates.load_state_dict(state)


# ---- several processes

WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "plain": lambda model: model,
    "ddp": DistributedDataParallel,
    "sharded": fully_shard,
}


def in_processes(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name, wrap in WRAPPERS.items():
        model = learned()
        qt.freeze_batch_norm(model)
        wrapped = wrap(model)
        optimizer = OPTIMIZERS["sgd"](wrapped.parameters())
        updates = Updates(wrapped, optimizer, share=0.25, every=1, by="rotation")
        for i in range(3):
            x = batch(i) if name == "plain" else batch(i).chunk(2)[rank]
            step(wrapped, optimizer, x)
            updates.step()
        whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
        found[name] = {n: p.detach().clone() for n, p in whole.items()}
    torch.save(found, f"{folder}/{rank}.pt")


@pytest.mark.slow
def test_processes_train_what_one_does(tmp_path: Path) -> None:
    with processes.found_by_ranks(in_processes, 2, tmp_path) as found:
        for name in ("ddp", "sharded"):
            for each, value in found[0]["plain"].items():
                for rank in found:
                    got: Tensor = rank[name][each]
                    torch.testing.assert_close(got, value, rtol=1e-3, atol=1e-4, msg=lambda m, e=each: f"{e}: {m}")


@each_route
@pytest.mark.parametrize("share", [0.5, 0.0])
def test_a_watch_changes_no_gradient(route: str, share: float) -> None:
    model = learned(route)
    qt.freeze_ranges(model)
    Updates(model, OPTIMIZERS["sgd"](model.parameters()), share=share)
    found = []
    for watch in (nullcontext, lambda: qt.debug.watch(model, every=1)):
        model.zero_grad()
        with watch():
            loss_of(model, batch(0)).backward()
        found.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
    scales = [name for name in found[0] if "weight_quantizer" in name]
    assert scales
    for name in found[0].keys() | found[1].keys():
        one, other = (of.get(name, torch.zeros(())) for of in found)
        torch.testing.assert_close(*torch.broadcast_tensors(one, other), rtol=1e-3, atol=1e-5)


def test_wrappers_of_optimizers_may_pass_no_closure() -> None:
    model = learned()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    updates = Updates(model, optimizer, share=0.25)
    before = model.get_parameter("conv.weight").detach().clone()
    loss_of(model, batch(0)).backward()
    optimizer.step(None)  # as accelerate does
    updates.step()
    moved = (model.get_parameter("conv.weight") != before).flatten(1).any(1)
    assert moved.nonzero().flatten().tolist() == chosen(model)["conv"]
