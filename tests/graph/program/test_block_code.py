"""Each block of a prepared model runs its own part of the graph, with the same bits as the graph in one piece."""

import copy
import gc
import linecache
import math
import pickle
import traceback
from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import qtoolkit as qt
from qtoolkit.graph import TracedBlock
from qtoolkit.graph.lint import lint
from qtoolkit.graph.program import forward as program
from tests import traceable
from tests.blocks import called_one_by_one, make_flat
from tests.processes import group_of_one

X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv2, self.bn2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + x)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stage = nn.Conv2d(4, 4, 1), nn.Sequential(Block(), nn.Dropout(), Block())
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stage(self.stem(x)).mean((2, 3)))


class Structures(nn.Module):
    """Arguments and results in tuples, lists and dicts; keywords; an argument that the example fixes."""

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, pair: list[Tensor], more: dict[str, Tensor], twice: bool = False) -> OrderedDict[str, object]:
            x, y = self.first(pair[0]), self.second(pair[1]) + more["shift"]
            return OrderedDict(out=(x + x if twice else x, y), none=None, inputs=[pair[0]])

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = self.Both(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        found = self.both([x, x + 1], twice=True, more={"shift": torch.ones(4, 8, 8) * x.shape[0]})
        return self.last(found["out"][0] + found["out"][1]) + found["inputs"][0]


class Branches(nn.Module):
    """Branches that share the quantizer of their input, and a block that uses what it returns itself."""

    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.first(x)
            return x, self.second(x)

    def __init__(self) -> None:
        super().__init__()
        self.stem = self.Stem()
        self.branches = nn.ModuleList(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU()) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x, y = self.stem(x)
        return torch.cat([branch(x) for branch in self.branches], 1) + y.mean()


class Stashes(nn.Module):
    """A block that leaves a tensor for others, and one that takes it."""

    class Leaves(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.shared[:] = [self.conv1(x)]
            return self.conv2(x)

    class Takes(Leaves):
        def forward(self, x: Tensor) -> Tensor:
            return self.conv1(x) + self.conv2(self.shared[0])

    def __init__(self) -> None:
        super().__init__()
        self.leaves, self.takes = self.Leaves(), self.Takes()
        self.leaves.shared = self.takes.shared = []

    def forward(self, x: Tensor) -> Tensor:
        return self.takes(self.leaves(x))


@dataclass
class Pair:
    first: Tensor
    second: Tensor


class MakesPair(nn.Module):
    class Maker(Block):
        def forward(self, x: Tensor) -> Pair:
            return Pair(self.conv1(x), self.conv2(x))

    def __init__(self) -> None:
        super().__init__()
        self.maker = self.Maker()

    def forward(self, x: Tensor) -> Tensor:
        return self.maker(x).first


def prepared_of(model: nn.Module, inputs: object = (X,), **options: object) -> nn.Module:
    """In one memory format, on any processor: a model that computes on codes converts its inputs as a whole."""
    prepared = qt.prepare(model, inputs, training_arithmetic="float", **{"backend": "tensorrt", **options})
    mode = prepared.training
    qt.calibrate(
        prepared.eval(), [inputs], progress=False
    )  # in training mode, ranges would follow the data and look at it
    return prepared.train(mode)


def step(model: nn.Module, inputs: object) -> tuple[list[Tensor], list[Tensor | None]]:
    torch.manual_seed(1)
    model.zero_grad()
    called = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    values = tree_leaves(vars(called) if hasattr(called, "boxes") else called)
    outputs = [value for value in values if isinstance(value, Tensor)]
    sum(output.square().sum() for output in outputs).backward()
    return outputs, [p.grad for p in model.parameters()]


def assert_equal(ours: object, theirs: object) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def runs(model: nn.Module) -> list[str]:
    """Return the names of the blocks that run their part of the graph."""
    return [name for name, m in model.named_modules() if isinstance(m, TracedBlock) and m._block_code]


MODELS = {
    **traceable.CASES,
    "net": (Net, lambda: (X,)),
    "structures": (Structures, lambda: (X,)),
    "branches": (Branches, lambda: (X,)),
    "stashes": (Stashes, lambda: (X,)),
    "pair": (MakesPair, lambda: (X,)),
    "sequential": (lambda: nn.Sequential(Block(), nn.Sequential(), nn.Conv2d(4, 4, 1)), lambda: (X,)),
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("backend", ["tensorrt", "onnxruntime"])
@pytest.mark.parametrize("name", MODELS)
def test_blocks_compute_the_bits_of_the_graph(name: str, backend: str) -> None:
    torch.manual_seed(0)
    make, inputs = MODELS[name]
    given = inputs()
    prepared = prepared_of(make(), given, backend=backend)
    flat, whole = make_flat(copy.deepcopy(prepared)), copy.deepcopy(prepared)
    for training in (True, False):
        with called_one_by_one():
            assert_equal(step(prepared.train(training), given), step(flat.train(training), given))
    whole.load_state_dict(prepared.state_dict())
    called = set[str]()
    for block in runs(prepared):
        prepared.get_submodule(block).register_forward_hook(lambda m, *args, block=block: called.add(block))
    for training in (True, False):
        assert_equal(step(prepared.train(training), given), step(whole.train(training), given))
    assert called == set(runs(prepared)), "the model calls the blocks that can be called"


RUN = {
    "net": ["stage", "stage.0", "stage.2"],
    "structures": ["both"],
    "branches": ["stem", "branches.0", "branches.1"],
    "sequential": ["0"],
    "stashes": [],
    "pair": [],
}


@pytest.mark.sweep(1)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", RUN)
def test_which_blocks_run(name: str, training: bool) -> None:
    prepared = prepared_of(MODELS[name][0]().train(training))
    for ours in (prepared, copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), qt.convert(prepared)):
        assert runs(ours) == RUN[name]


def test_a_block_that_does_not_run_says_why() -> None:
    stashes, pair = prepared_of(Stashes()), prepared_of(MakesPair())
    for block, why in (
        (stashes.leaves, "it computes 'leaves_conv1', which it does not return"),
        (stashes.takes, "it takes 'leaves_conv1', which is not among its arguments"),
        (pair.maker, "it returns a Pair, which a graph does not pass on"),
    ):
        with pytest.raises(RuntimeError, match=why):
            block(X)


def test_a_block_is_called_as_in_the_model() -> None:
    model = Net()
    del model.stage[1]
    prepared = prepared_of(model).eval()
    x = prepared.activation_quantizers.x(X)
    x = prepared.stem(x)
    for block in prepared.stage:
        x = block(x)
    assert torch.equal(x, prepared.stage(prepared.stem(prepared.activation_quantizers.x(X))))
    assert torch.equal(prepared.head(prepared.activation_quantizers.mean(x.mean((2, 3)))), prepared(X))


def test_a_block_takes_the_arguments_of_the_model_only() -> None:
    both = prepared_of(Structures()).both
    result = both(pair=[X, X], more={"shift": X}, twice=True)
    assert (type(result), list(result), result["none"]) == (OrderedDict, ["out", "none", "inputs"], None)
    assert result["inputs"][0] is not None
    with pytest.raises(ValueError, match="argument 'twice' of this block must be True, as when .* got False"):
        both([X, X], more={"shift": X}, twice=False)
    with pytest.raises(TypeError, match="unexpected keyword argument 'other'"):
        both([X, X], more={"shift": X}, other=1)


def test_an_argument_may_have_any_name() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, run: Tensor, code: Tensor) -> Tensor:
            return self.conv(run) + code

    prepared = prepared_of(Named(), {"run": X, "code": X})
    for training in (True, False):
        prepared.train(training)
        assert torch.equal(prepared(run=X, code=X), prepared(X, X))


CPU = torch.device("cpu")


def test_an_argument_may_have_the_name_of_a_global_of_the_code() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, inf: Tensor, device: torch.device, torch: Tensor) -> Tensor:
            return self.conv(inf).clamp(-1.0, math.inf) + inf.new_ones(1, device=device) + torch.to(CPU)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x, x.device, torch=x) * 2

    model = Outer()
    prepared = prepared_of(model, (X,))
    with qt.disable_quantization(prepared):
        for training in (True, False):
            assert torch.equal(prepared.train(training)(X), model(X))
            assert torch.equal(prepared.inner(X, X.device, torch=X), model.inner(X, X.device, torch=X))


def test_hooks_see_what_the_model_passes() -> None:
    seen = []
    prepared = prepared_of(Structures())
    prepared.both.register_forward_hook(lambda *args: seen.append(args[1:]), with_kwargs=True)
    prepared(X)
    ((args, kwargs, result),) = seen
    assert [x.shape for x in args[0]] == [X.shape, X.shape]
    assert (kwargs["twice"], list(kwargs["more"]), list(result)) == (True, ["shift"], ["out", "none", "inputs"])


def test_backward_hooks_see_gradients() -> None:
    prepared, seen = prepared_of(Net()), []
    prepared.stage[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append((*inputs, *outputs)))
    prepared(X).square().sum().backward()
    assert [gradient.shape for gradient in seen[0]] == [X.shape, X.shape]


# ---- checkpointing, sharding, compiling


def saved_bytes(model: nn.Module) -> int:
    """Return the size of what a forward keeps for backward."""
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        outputs = model(X)  # which keeps the memory, so that no two tensors have one address
    return sum(kept.values()) * bool(outputs.requires_grad)


def checkpointed(model: nn.Module) -> nn.Module:
    result = copy.deepcopy(model)
    apply_activation_checkpointing(result, check_fn=lambda module: isinstance(module, Block))
    return result


def test_activation_checkpointing_of_blocks() -> None:
    torch.manual_seed(0)
    prepared = prepared_of(Net())
    ours = checkpointed(prepared)
    for _ in range(2):  # the second after the statistics of batch norms have moved
        assert_equal(step(ours, (X,)), step(prepared, (X,)))
    assert saved_bytes(ours) < 0.5 * saved_bytes(prepared)
    called = []
    ours.stage[0].conv1.register_forward_hook(lambda *args: called.append(args))
    step(ours, (X,))
    assert len(called) == 2, "backward recomputes the block"


def without_training(report: qt.QuantizationReport) -> str:
    return str(replace(report, layers=tuple(replace(line, training="") for line in report.layers)))


def test_a_checkpointed_model_is_copied_reported_and_converted_as_before() -> None:
    prepared = prepared_of(Net())
    ours = checkpointed(prepared)
    assert list(ours.state_dict()) == list(prepared.state_dict())
    report, wanted = qt.quantization_report(ours), qt.quantization_report(prepared)
    assert without_training(report) == without_training(wanted)
    # A wrapped block is called, and the quantizer behind it is not fused with its last batch norm.
    said, wanted_said = ({line.name: line.training for line in each.layers} for each in (report, wanted))
    for block, relu in (("stage.0", "relu_1"), ("stage.2", "relu_3")):
        fused = wanted_said[f"{block}.bn2"]
        wanted_said[f"{block}.bn2"] = fused.replace(", its quantizer", f"; a block returns {relu!r}")
        assert fused != wanted_said[f"{block}.bn2"]
    assert said == wanted_said
    assert lint(ours) == lint(prepared)
    for copied in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert type(copied.stage[0]).__name__ == "CheckpointWrapper"
        assert_equal(step(copied, (X,)), step(copy.deepcopy(prepared), (X,)))
    assert torch.equal(qt.convert(ours)(X), qt.convert(prepared)(X))
    assert "bn1.weight" not in str(list(qt.convert(ours).state_dict()))


def test_checkpoint_calls_a_block() -> None:
    prepared = prepared_of(Net())
    again = copy.deepcopy(prepared)
    results = []
    for model, call in ((prepared, lambda f, x: f(x)), (again, lambda f, x: checkpoint(f, x, use_reentrant=False))):
        model.stage[1].p = 0.0
        call(model.stage[2], X).square().sum().backward()
        results.append([p.grad for p in model.parameters()])
    assert_equal(*results)


def test_blocks_are_sharded() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule, fully_shard

    prepared = prepared_of(Net())
    ours = copy.deepcopy(prepared)
    with group_of_one():
        mesh = init_device_mesh("cpu", (1,))
        for block in (ours.stage[0], ours.stage[2], ours):
            fully_shard(block, mesh=mesh)
        assert isinstance(ours.stage[0], FSDPModule)
        assert isinstance(ours.stage[0], Block)
        outputs, gradients = step(ours, (X,))
        assert_equal((outputs, [g.to_local() for g in gradients]), step(prepared, (X,)))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_a_model_of_blocks_compiles(training: bool) -> None:
    model = Net()
    del model.stage[1:]
    prepared = prepared_of(model).train(training)
    compiled = torch.compile(copy.deepcopy(prepared), fullgraph=True, backend="aot_eager")
    assert_equal(step(compiled, (X,)), step(prepared, (X,)))


@pytest.mark.slow
@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.sweep)], ids=["train", "eval"])
def test_each_block_compiles(training: bool) -> None:
    prepared = prepared_of(Net()).train(training)
    prepared.stage[1].p = 0.0
    again = copy.deepcopy(prepared)
    again.stage[0] = torch.compile(again.stage[0], backend="eager")
    again.stage[2].compile(backend="eager")
    assert_equal(step(again, (X,)), step(prepared, (X,)))


@pytest.mark.slow
def test_the_exported_program_has_the_names_of_the_model() -> None:
    converted = qt.convert(prepared_of(Net()))
    for strict in (True, False):
        program = torch.export.export(converted, (X,), strict=strict)
        assert torch.equal(program.module()(X), converted(X))
        assert program.state_dict.keys() <= converted.state_dict().keys()


def test_fused_chains_keep_their_blocks() -> None:
    patterns = {(nn.Conv2d, nn.BatchNorm2d): nn.Sequential}
    prepared = prepared_of(Net(), fuse_patterns=patterns)
    assert runs(prepared) == ["stage", "stage.0", "stage.2"]
    assert_equal(step(prepared, (X,)), step(make_flat(copy.deepcopy(prepared)), (X,)))


def test_the_code_is_as_before() -> None:
    prepared = qt.prepare(Net(), (X,), backend="tensorrt")
    assert "self.stage(" not in prepared.code
    assert "stage_2_conv2" in [node.name for node in prepared.graph.nodes]


def test_code_is_compiled_once_prepare_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    names, compiled = list[str](), program.compiled

    def recorded(graph: fx.Graph, name: str) -> Any:
        names.append(name)
        return compiled(graph, name)

    monkeypatch.setattr(program, "compiled", recorded)
    qt.prepare(Net().train(), (X,), backend="tensorrt")
    assert Counter(names) == {"": 3, "stage": 2, "stage.0": 2, "stage.2": 2}, "units and nodes; one model by block too"


def test_tracebacks_have_the_lines_of_the_code_as_long_as_it_is_there() -> None:
    def sources() -> set[str]:
        gc.collect()
        return {file for file in linecache.cache if file.startswith("<forward of")}

    before = sources()
    prepared = qt.prepare(Net().train(), (X,), backend="tensorrt")
    qt.calibrate(prepared, [X], progress=False)
    try:
        prepared(X[:, :1])
    except ValueError as error:
        lines = {entry.filename: entry.line for entry in traceback.extract_tb(error.__traceback__)}
    (line,) = [line for file, line in lines.items() if file.startswith("<forward of")]
    assert "stem_unit = " in str(line)
    assert sources() > before
    del prepared
    assert sources() <= before


def test_code_that_is_compiled_again_is_not_wrapped_again() -> None:
    model = qt.prepare(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).train(), (torch.randn(2, 3, 8, 8),), backend="tensorrt"
    )
    depths = []
    for _ in range(2):
        model.divide(model.calls)
        depths.append(sum(1 for _ in wrapped(type(model).forward)))
    assert depths[0] == depths[1] > 0


def wrapped(function: Any) -> Iterator[Any]:
    """Yield what a function wraps, and what that wraps."""
    while (function := getattr(function, "__wrapped__", None)) is not None:
        yield function


class Named(nn.Module):
    """A block whose layers have the given names, as attention blocks of transformers have `self` and `output`."""

    def __init__(self, inner: nn.Module, name: str = "self") -> None:
        super().__init__()
        self.first = name
        self.add_module(name, inner)
        self.output = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.get_submodule(self.first)(x))


@pytest.mark.parametrize("where", ["layer", "block", "layer of a block", "block of a block", "batch norm"])
def test_a_module_may_be_named_self(where: str) -> None:
    inner = {"layer": nn.Conv2d(4, 4, 1), "block": Block(), "batch norm": nn.Conv2d(4, 4, 1)}[where.split(" of")[0]]

    def named(name: str) -> nn.Module:
        torch.manual_seed(0)
        model = Named(copy.deepcopy(inner), name)
        if where == "batch norm":
            model.output = nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())
        return nn.Sequential(model) if where.endswith("of a block") or where == "batch norm" else model

    got, wanted = (prepared_of(named(name)) for name in ("self", "other"))
    assert_equal(step(got, (X,)), step(wanted, (X,)))
    assert torch.equal(qt.convert(got)(X), qt.convert(wanted)(X))


class Recurrent(nn.Module):
    """Returns a product, of which the block around it multiplies its input, as a state."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.dropout = nn.Linear(4, 4), nn.Dropout(0.1)

    def forward(self, x: Tensor, h: list[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        gates = self.fc(x) + h[0]
        h = [torch.sigmoid(gates) * torch.sigmoid(gates + 1)]
        self.dropout(h[0])  # for a next layer
        return h, [gates]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.cell = nn.Conv2d(4, 4, 3, padding=1), Recurrent()

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[list[Tensor], list[Tensor]]]:
        x = self.conv(x)
        means = x.mean((2, 3))
        h, c = self.cell(means, [torch.zeros_like(means)])
        return x * h[-1].unsqueeze(-1).unsqueeze(-1), (h, c)


class WithStates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated, self.last = Gated(), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gated(x)[0])


def test_a_state_that_nobody_reads_is_what_the_inner_block_returns() -> None:
    x = torch.randn(2, 4, 6, 6)
    prepared = qt.prepare(WithStates().train(), x, backend="onnxruntime")
    qt.calibrate(prepared, [x], progress=False)
    _, (h, _) = prepared.gated(x)
    assert h[0].shape == (2, 4)
    prepared(x).sum().backward()
    assert prepared.gated.cell.fc.weight.grad is not None
