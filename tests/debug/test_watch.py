"""watch(): what is recorded equals a plain computation, on both routes, under checkpointing, AMP and compile; its errors."""

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from tests.nets import settled
from tests.processes import group_of_one
from tests.training.nets import ROUTES, SHAPE, learned, loss_of, step


def sgd(model: nn.Module, lr: float = 0.01) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr)


class Calls:
    """The inputs, grids and gradients of each call of each quantizer, by plain hooks."""

    def __init__(self, model: nn.Module) -> None:
        self.quantizers = qt.quantizers_of(model)
        self.seen: dict[str, list[tuple[Tensor, Tensor, Tensor]]] = {}
        self.gradients: dict[str, list[float]] = {name: [] for name in self.quantizers}
        for name, quantizer in self.quantizers.items():
            quantizer.register_forward_hook(lambda *call, name=name: self.note(name, *call))

    def note(self, name: str, quantizer: qt.TensorQuantizer, args: tuple[Tensor], y: Tensor) -> None:
        zero_point = torch.zeros(()) if quantizer.zero_point is None else quantizer.zero_point
        shape = (-1, *[1] * (y.dim() - 1)) if quantizer.spec.axis == 0 else ()
        self.seen.setdefault(name, []).append(
            (args[0].detach().clone(), quantizer.scale.reshape(shape).clone(), zero_point.reshape(shape).clone())
        )
        if y.requires_grad:
            y.register_hook(lambda g: self.gradients[name].append(float(g.float().norm())))


@pytest.mark.parametrize("quantizer", ["lsq", "fixed"])
@pytest.mark.parametrize("route", ROUTES)
def test_rows_equal_a_plain_computation(route: str, quantizer: str) -> None:
    model = learned(route, quantizer)
    calls, optimizer = Calls(model), sgd(model)
    watched = qt.debug.watch(model, every=1)
    scale_gradients = {name: [] for name in calls.quantizers}
    for factor in (1.0, 3.0):
        step(model, optimizer, torch.randn(SHAPE) * factor)
        for name, each in calls.quantizers.items():
            norms = [p.grad.norm() for p in each.parameters()]
            scale_gradients[name] += [float(torch.stack(norms).norm())] if norms else []
    rows = {row.name: row for row in watched.rows()}
    assert list(rows) == list(calls.seen)  # in the order of their first calls
    for name, row in rows.items():
        spec, seen = calls.quantizers[name].spec, calls.seen[name]
        codes = [torch.round(x / scale) + zero_point for x, scale, zero_point in seen]
        outside = [((c < spec.qmin) | (c > spec.qmax)).sum() for c in codes]
        used = torch.cat([c.clamp(spec.qmin, spec.qmax).flatten() for c in codes]).unique()
        assert row.calls == len(seen) == 2
        assert (row.lowest, row.highest) == (
            min(float(x.min()) for x, *_ in seen),
            max(float(x.max()) for x, *_ in seen),
        )
        assert row.clipped == pytest.approx(float(sum(outside)) / sum(c.numel() for c in codes))
        assert row.levels == used.numel() / 256
        for found, norms in ((row.gradient, calls.gradients[name]), (row.scale_gradient, scale_gradients[name])):
            assert found == (pytest.approx(sum(norms) / 2, rel=1e-5) if norms else None)
        assert row.nonfinite == 0
    assert rows["stem.weight_quantizer"].spec == calls.quantizers["stem.weight_quantizer"].spec.describe()
    assert any(row.clipped > 0.01 for row in rows.values())


@pytest.mark.parametrize(
    ("bits", "signed", "values", "clipped", "levels"),
    [
        (2, True, [0.0, 0.0], 0.0, 1 / 4),
        (2, True, [-9.0, -9.0, 0.0, 1.0], 0.5, 3 / 4),
        (2, False, [9.0, 3.0, 1.0, -1.0], 0.5, 3 / 4),
        (16, True, [1.0, -32768.0, -32769.0, 40000.0], 0.5, 3 / 65536),
        (16, False, [65535.0, 65536.0, 0.0, 7.0], 0.25, 3 / 65536),
    ],
)
def test_shares(bits: int, signed: bool, values: list[float], clipped: float, levels: float) -> None:
    quantizer = qt.TensorQuantizer(qt.QuantSpec(bits=bits, signed=signed))
    quantizer.load_grid(torch.tensor(1.0), None)
    watched = qt.debug.watch(quantizer)
    for value in values:
        quantizer(torch.tensor([value]))
    (row,) = watched.rows()
    assert (row.calls, row.clipped, row.levels) == (len(values), clipped, levels)
    watched.close()


def test_other_formats_and_quantizers_that_are_off_have_a_range() -> None:
    e4m3, off = qt.TensorQuantizer(qt.QuantSpec(format="e4m3")), qt.TensorQuantizer(qt.QuantSpec())
    e4m3.amax = 448.0
    off.disable()
    model = nn.Sequential(e4m3, off)
    with qt.debug.watch(model) as watched:
        model(torch.tensor([-2.0, 700.0]))
    rows = watched.rows()
    assert [(r.lowest, r.highest, r.clipped, r.levels) for r in rows] == [
        (-2.0, 700.0, None, None),
        (-2.0, 448.0, None, None),
    ]
    assert rows[1].grid_lowest is None
    assert str(watched).splitlines()[3].split("  ")[0] == "0"


def test_nothing_changes_by_watching() -> None:
    """But roundings: compiled and fused code does not run in a sampled step."""
    model = learned().double()
    twin, x = copy.deepcopy(model), torch.randn(SHAPE, dtype=torch.float64)
    watched = qt.debug.watch(model, every=2)
    optimizers = sgd(model), sgd(twin)
    for _ in range(3):
        step(model, optimizers[0], x)
        step(twin, optimizers[1], x)
    for name, tensor in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], tensor, rtol=1e-9, atol=1e-9, msg=name)
    watched.close()
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks


def test_one_of_some_steps_is_sampled_with_all_its_forwards() -> None:
    model = learned()
    optimizer = sgd(model)
    watched = qt.debug.watch(model, every=3)
    for _ in range(5):
        for _ in range(2):  # gradient accumulation
            loss_of(model, torch.randn(SHAPE)).backward()
        optimizer.step()
        model.eval()(torch.randn(SHAPE))  # no part of the training
        model.train()
    other = nn.Linear(2, 2)
    sgd(other).step()  # no step of this model
    assert (watched.steps, watched.sampled) == (5, 2)
    assert {row.calls for row in watched.rows()} == {4}
    assert str(watched).startswith("2 steps sampled, up to step 5\n\nquantizer")
    watched.reset()
    assert {(row.calls, row.lowest, row.clipped, row.gradient) for row in watched.rows()} == {(0, None, None, None)}


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_not_counted(reentrant: bool) -> None:
    model = learned()
    twin, x = copy.deepcopy(model), torch.randn(SHAPE, requires_grad=True)
    with qt.debug.watch(model) as plain:
        loss_of(model, x).backward()
    with qt.debug.watch(twin) as watched:
        checkpoint(loss_of, twin, x, use_reentrant=reentrant).backward()
    assert watched.rows() == plain.rows()
    assert all(row.calls == 1 and row.gradient > 0 for row in plain.rows())


def test_copies_and_pickles_are_not_watched() -> None:
    model = learned()
    watched = qt.debug.watch(model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        loss_of(twin, torch.randn(SHAPE)).backward()
    assert {row.calls for row in watched.rows()} == {0}


@pytest.mark.parametrize("route", ROUTES)
def test_a_watched_model_is_converted_and_exported(route: str, tmp_path) -> None:
    pytest.importorskip("onnxruntime")
    model, x = learned(route), torch.randn(SHAPE)
    with qt.debug.watch(model):
        assert torch.equal(qt.convert(model)(x), copy.deepcopy(model).eval()(x))
        qt.export_onnx(model, x, tmp_path / "model.onnx")  # verifies the codes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_under_autocast(dtype: torch.dtype) -> None:
    model = learned()
    with qt.debug.watch(model) as watched, torch.autocast("cpu", dtype):
        loss_of(model, torch.randn(SHAPE)).backward()
    assert all(row.calls == 1 and 0 < row.gradient < 100 and 0 < row.levels <= 1 for row in watched.rows())


@pytest.mark.slow
@pytest.mark.parametrize("first", ["watched", "compiled"])
@pytest.mark.parametrize("route", ROUTES)
def test_compiled_models_are_watched(route: str, first: str) -> None:
    """Sampled steps run without the compiler; the others compile once."""
    model, counter = learned(route), _Compilations()
    early = qt.debug.watch(model, every=2) if first == "watched" else None
    optimizer, compiled = sgd(model), torch.compile(model, fullgraph=True, backend=counter)
    watched = early or qt.debug.watch(compiled, every=2)
    watched.guard(optimizer)
    counts = []
    for _ in range(5):
        step(compiled, optimizer, torch.randn(SHAPE))
        counts.append(counter.count)
    assert counts == [0, 1, 1, 1, 1]
    assert {row.calls for row in watched.rows()} == {3}
    words = (
        "Run the model under qtoolkit.stop_on_nonfinite" if first == "watched" else "got NaN or infinities: the layer"
    )
    with pytest.raises(RuntimeError, match=rf"'fc.bias' is not finite.*{words}"):
        step(compiled, optimizer, torch.full(SHAPE, math.nan))
    watched.close()
    step(compiled, optimizer, torch.randn(SHAPE))
    assert counter.count == 1


class _Compilations:
    count = 0

    def __call__(self, gm: torch.fx.GraphModule, inputs: list[Tensor]) -> torch.fx.GraphModule:
        self.count += 1
        return gm


def test_a_model_in_distributed_data_parallel() -> None:
    with group_of_one():
        model = nn.parallel.DistributedDataParallel(learned())
        optimizer = sgd(model)
        with qt.debug.watch(model) as watched:
            watched.guard(optimizer)
            step(model, optimizer, torch.randn(SHAPE))
            assert {row.calls for row in watched.rows()} == {1}
            bad = torch.full(SHAPE, torch.nan)
            with pytest.raises(RuntimeError, match=r"quantizer 'activation_quantizers.x' got NaN"):
                step(model, optimizer, bad)


def test_a_watch_that_nobody_holds_ends() -> None:
    model = learned()
    hooks = [
        len(d) for d in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    ]
    watched, other = qt.debug.watch(model), qt.debug.watch(model, every=1)
    watched.close()
    assert eval_frame._stance.stance == "force_eager"
    del watched, other
    assert eval_frame._stance.stance == "default"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert hooks == [
        len(d) for d in (torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks)
    ]


def test_a_fully_sharded_model() -> None:
    with group_of_one():
        plain, model = learned(), fully_shard(learned(), mesh=init_device_mesh("cpu", (1,)))
        rows = []
        for each in (plain, model):
            optimizer = sgd(each)
            with qt.debug.watch(each) as watched:
                watched.guard(optimizer)
                x = torch.linspace(-2, 2, math.prod(SHAPE)).reshape(SHAPE)
                step(each, optimizer, x)
                rows.append(watched.rows())
                with pytest.raises(RuntimeError, match=r"watch: the gradient of 'fc.bias' is not finite"):
                    step(each, optimizer, x * math.nan)
        assert rows[0] == rows[1]


# ---- errors before the optimizer


def tensors(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=0, atol=0, equal_nan=True, msg=name)


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("every", [1, 20])
def test_a_loss_that_is_nan_names_the_first_quantizer(route: str, every: int) -> None:
    model = learned(route)
    optimizer = sgd(model)
    watched = qt.debug.watch(model, every)
    step(model, optimizer, torch.randn(SHAPE))
    with torch.no_grad():
        model.get_parameter("conv.weight")[1] = math.nan
    loss = loss_of(model, torch.randn(SHAPE))
    before, generator = tensors(model), torch.get_rng_state()
    words = (
        r"the loss is nan after 1 steps\. In forward, quantizer 'conv\.weight_quantizer' got NaN.*the weight, or the"
    )
    with pytest.raises(RuntimeError, match=words):
        watched.check(loss)
    assert_same(tensors(model), before)
    assert torch.equal(torch.get_rng_state(), generator)
    assert not any(quantizer.stopping for quantizer in qt.quantizers_of(model).values())


def test_a_loss_function_with_nan_is_told_apart() -> None:
    model = learned()
    with qt.debug.watch(model) as watched:
        loss = model(torch.randn(SHAPE)).sum() * math.nan
        with pytest.raises(
            RuntimeError, match=r"all quantizers get finite values: the error starts after the last one, or in"
        ):
            watched.check(loss)
        watched.check(torch.tensor(3.0))


@pytest.mark.parametrize("foreach", [False, True])
def test_gradients_that_are_not_finite_stop_the_step(foreach: bool) -> None:
    model = learned()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, foreach=foreach)
    watched = qt.debug.watch(model)
    watched.guard(optimizer)
    step(model, optimizer, torch.randn(SHAPE))
    before = tensors(model)
    running = {name for name in before if "running" in name or "batches" in name}
    running |= {f"conv.weight_quantizer.{name}" for name in ("_scale", "_rate", "_factor")}  # for the running variance
    with pytest.raises(
        RuntimeError, match=r"quantizer 'activation_quantizers.x' got NaN.*has changed nothing in this step"
    ):
        step(model, optimizer, torch.full(SHAPE, math.nan))
    assert_same({k: v for k, v in tensors(model).items() if k not in running}, before)
    optimizer.zero_grad()
    (model(torch.zeros(SHAPE)) * 0).sqrt().sum().backward()  # the derivative of sqrt at 0
    with pytest.raises(
        RuntimeError, match=r"gradient of 'fc.bias' is not finite.*in backward, between the loss and 'fc"
    ):
        optimizer.step()


def test_large_gradients_are_no_error() -> None:
    """Their norm overflows."""
    model = learned()
    optimizer = sgd(model, 1e-30)
    with qt.debug.watch(model) as watched:
        watched.guard(optimizer)
        loss_of(model, torch.randn(SHAPE)).backward()
        model.get_parameter("fc.weight").grad.fill_(1e30)
        optimizer.step()


@pytest.mark.parametrize(
    ("ratio", "words"), [(0.0, "0 times its start"), (math.inf, "inf times"), (2.0**30, "1.07e.09 times")]
)
@pytest.mark.parametrize("route", ROUTES)
def test_a_lost_scale_is_named(route: str, ratio: float, words: str) -> None:
    model = learned(route)
    optimizer = sgd(model)
    with qt.debug.watch(model) as watched:
        watched.guard(optimizer)
        step(model, optimizer, torch.randn(SHAPE))
        with torch.no_grad():
            model.get_parameter("conv.weight_quantizer._relative_scale")[3] = ratio
        before = tensors(model)
        with pytest.raises(
            RuntimeError,
            match=rf"learned scale of quantizer 'conv\.weight_quantizer' has become {words}.*1 of 8 values.*scale_lr",
        ):
            optimizer.step()
        assert_same(tensors(model), before)
    optimizer.step()  # closed


def test_a_training_that_diverges_ends_with_a_sentence() -> None:
    """A learning rate far too large, as a user would have it."""
    model = learned()
    optimizer = torch.optim.SGD(model.parameters(), 1e6)
    with qt.debug.watch(model) as watched:
        watched.guard(optimizer)
        words = r"^watch: the (learned scale of quantizer|gradient of) '.* changed nothing"
        with pytest.raises(RuntimeError, match=words):  # noqa: PT012
            for _ in range(50):
                step(model, optimizer, torch.randn(SHAPE))
    assert all(torch.isfinite(p).all() for p in model.parameters())


@pytest.mark.parametrize("fused", [False, True])
def test_steps_that_a_grad_scaler_skips_are_no_error(fused: bool) -> None:
    model = learned()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=1000)
    watched = qt.debug.watch(model, every=1)
    watched.guard(optimizer)
    before, skipped, norms = tensors(model), 0, []
    ratio = model.get_parameter("conv.weight_quantizer._relative_scale")
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(model, torch.randn(SHAPE))
        scaler.scale(loss).backward()
        scale = scaler.get_scale()
        norms.append(float(ratio.grad.norm()) / scale)
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() < scale:
            norms.pop()
            skipped += 1
    assert 0 < skipped < 40
    assert not torch.equal(model.get_parameter("fc.weight"), before["fc.weight"])
    rows = watched.to_dict()
    assert rows["conv.weight_quantizer"]["scale_gradient"] == pytest.approx(sum(norms) / len(norms), rel=1e-4)
    assert all(math.isfinite(row["gradient"]) and row["nonfinite"] == 0 for row in rows.values())


def test_sparse_gradients() -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.fc = nn.Embedding(6, 4, sparse=True), nn.Linear(4, 2)

        def forward(self, index: Tensor) -> Tensor:
            return self.fc(self.table(index))

    index = torch.tensor([1, 1, 5])
    model = qt.prepare(Table().train(), index, backend="tensorrt")
    qt.calibrate(model, [index], progress=False)
    optimizer = sgd(model.train())
    with qt.debug.watch(model) as watched:
        watched.guard(optimizer)
        step(model, optimizer, index)
        with torch.no_grad():
            model.get_parameter("fc.weight").fill_(math.inf)
        with pytest.raises(RuntimeError, match=r"quantizer 'fc\.weight_quantizer' got NaN"):
            step(model, optimizer, index)


def test_bad_arguments() -> None:
    model = learned()
    for arguments, kind, words in (
        (
            (nn.Linear(2, 2),),
            ValueError,
            r"watch: this Linear has no trainable quantizer; pass the result of qtoolkit\.prepare",
        ),
        ((qt.convert(model),), ValueError, r"has no trainable quantizer"),
        ((3,), TypeError, r"watch: model must be a torch\.nn\.Module, got int"),
        ((model, 0), ValueError, r"watch: every must be at least 1, got 0"),
        ((model, 0.5), TypeError, r"watch: every must be a whole number, got 0\.5"),
    ):
        with pytest.raises(kind, match=words):
            qt.debug.watch(*arguments)


# ---- cost


class Ops(TorchDispatchMode):
    """The names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.names.append(str(op.name()))
        return op(*args, **(kwargs or {}))


WAITING = (
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::equal",
    "aten::is_nonzero",
    "aten::bincount",
    "aten::masked_select",
)


@pytest.mark.parametrize(("guarded", "waits"), [(False, 0), (True, 1)])
@pytest.mark.parametrize("route", ROUTES)
def test_a_sampled_step_does_not_wait_for_the_device(route: str, guarded: bool, waits: int) -> None:
    model = settled(learned(route))
    optimizer = torch.optim.SGD(model.parameters(), 0.01, foreach=True)
    with qt.debug.watch(model, every=1) as watched:
        if guarded:
            watched.guard(optimizer)
        with Ops() as ops:
            step(model, optimizer, torch.randn(SHAPE))
    names = ops.names
    assert "qtoolkit::observe_histogram_" in names
    assert sum(name.startswith(WAITING) for name in names) == waits
    assert all(row.calls == 1 for row in watched.rows())
