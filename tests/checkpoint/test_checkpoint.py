"""Checkpoints of one process: they resume bit for bit, take older ones and float ones, and refuse all else before they load."""

import copy
import json
import os
import pickle
import random
import resource
import signal
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from qtoolkit.checkpoint import folder, loading
from qtoolkit.tuning import QuantizationSchedule
from tests import processes
from tests.test_state_dicts import Net, X, prepared_net
from tests.training.nets import ROUTES, SHAPE, quantized, step

safetensors = pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file  # noqa: E402

KINDS = ["last.safetensors", "last"]
each_kind = pytest.mark.parametrize("kind", KINDS)


def same(one: nn.Module, other: nn.Module) -> bool:
    state = other.state_dict()
    return all(torch.equal(value, state[name]) for name, value in one.state_dict().items())


def everything(model: nn.Module) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]


class Training:
    """A model with what a script trains it with; its data comes from torch's, NumPy's and Python's generators."""

    def __init__(self, route: str, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        self.model = quantized(route, "lsq").train()
        self.optimizer = optimizer(qt.parameter_groups(self.model, lr=1e-3))
        self.rate = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 5])
        self.phases = QuantizationSchedule(self.model, observe=3, freeze_ranges=5)

    @property
    def state(self) -> dict[str, Any]:
        return {"rate": self.rate, "phases": self.phases, "epoch": 7, "best": (0.1, torch.tensor(float("nan")))}

    def train(self, steps: int) -> None:
        for _ in range(steps):
            step(self.model, self.optimizer, torch.randn(SHAPE) * random.random() + float(np.random.rand()))
            self.rate.step()
            self.phases.step()


OPTIMIZERS = [
    torch.optim.AdamW,
    lambda groups: torch.optim.SGD(groups, lr=torch.tensor(0.01), momentum=0.9),
    lambda groups: torch.optim.SGD(groups, lr=0.01),
]


@each_kind
@pytest.mark.parametrize(("route", "optimizer"), [(ROUTES[0], 0), (ROUTES[1], 0), (ROUTES[0], 1), (ROUTES[0], 2)])
@pytest.mark.parametrize("before", [2, 4])  # while it observes, and after
def test_a_resumed_training_goes_on_bit_for_bit(
    tmp_path: Path, kind: str, route: str, optimizer: int, before: int
) -> None:
    one = Training(route, OPTIMIZERS[optimizer])
    one.train(before)
    qt.save_checkpoint(one.model, tmp_path / kind, one.optimizer, one.state)
    one.train(3)
    drawn = torch.rand(1), random.random(), np.random.rand()

    torch.manual_seed(5)
    other = Training(route, OPTIMIZERS[optimizer])
    found = qt.load_checkpoint(
        other.model, tmp_path / kind, other.optimizer, {"rate": other.rate, "phases": other.phases}
    )
    assert found.random
    assert found.state["epoch"] == 7
    assert found.state["best"][0] == 0.1
    assert found.unused == ()
    other.train(3)
    assert same(one.model, other.model)
    assert drawn == (torch.rand(1), random.random(), np.random.rand())
    assert one.optimizer.param_groups[0]["lr"] == other.optimizer.param_groups[0]["lr"]


@each_kind
def test_a_checkpoint_of_a_model_alone_leaves_the_generators(tmp_path: Path, kind: str) -> None:
    model = prepared_net()
    qt.save_checkpoint(model, tmp_path / kind)
    before = torch.get_rng_state()
    found = qt.load_checkpoint(prepared_net(), tmp_path / kind)
    torch.manual_seed(0)
    assert not found.random
    assert found.backend == "tensorrt10"
    assert str(found).endswith("a checkpoint of version 1")
    qt.load_checkpoint(model, tmp_path / kind)
    assert torch.equal(torch.get_rng_state(), torch.manual_seed(0).get_state())
    assert before.shape == torch.get_rng_state().shape


@each_kind
def test_a_converted_model_a_shared_weight_and_views_are_saved(tmp_path: Path, kind: str) -> None:
    prepared = prepared_net()
    converted = qt.convert(prepared)
    qt.save_checkpoint(converted, tmp_path / "converted" / kind)
    other = qt.convert(prepared_net("tensorrt10"))
    qt.load_checkpoint(other, tmp_path / "converted" / kind)
    assert torch.equal(other(X), converted(X))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(10, 4), nn.Linear(4, 10, bias=False)
            self.head.weight = self.embedding.weight
            self.register_buffer("rows", torch.randn(4, 3).t())
            self.register_buffer("flat", self.get_buffer("rows").t().reshape(-1))
            self.register_buffer("one", torch.tensor(1.5))
            self.register_buffer("none", torch.zeros(0, 2, dtype=torch.bfloat16))

    tied, fresh = Tied(), Tied()
    qt.save_checkpoint(tied, tmp_path / kind)
    qt.load_checkpoint(fresh, tmp_path / kind)
    assert same(tied, fresh)
    assert fresh.head.weight is fresh.embedding.weight


def test_a_file_is_one_of_safetensors_with_the_names_of_the_state_dict(tmp_path: Path) -> None:
    model = prepared_net()
    qt.save_checkpoint(model, tmp_path / "a.safetensors")
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == model.state_dict().keys()
    assert all(torch.equal(value, found[name]) for name, value in model.state_dict().items())


# ---- what else is accepted


@pytest.mark.parametrize("wrapping", [None, "state_dict", "model", "model_state_dict"])
def test_a_float_checkpoint_gives_weights_and_their_ranges(tmp_path: Path, wrapping: str | None) -> None:
    torch.manual_seed(1)
    floats = Net()
    state = floats.state_dict()
    torch.save({wrapping: state, "epoch": 3} if wrapping else state, tmp_path / "float.pt")
    save_file(dict(state), tmp_path / "float.safetensors")
    for name in ("float.pt", "float.safetensors"):
        prepared = prepared_net()
        found = qt.load_checkpoint(prepared, tmp_path / name)
        assert found.version is None
        assert found.missing == ()
        wanted = prepared_net()
        wanted.load_state_dict(state)
        assert same(prepared, wanted)


@pytest.mark.parametrize("wrapper", ["module.", "_orig_mod.", "module._orig_mod."])
def test_state_dicts_of_wrapped_models_load(tmp_path: Path, wrapper: str) -> None:
    """As DistributedDataParallel and torch.compile name their entries, and both in each other."""
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    state = {f"{wrapper}{name}": value.clone() for name, value in model.state_dict().items()}
    torch.save({"model": state}, tmp_path / "wrapped.pt")
    save_file(state, tmp_path / "wrapped.safetensors")
    for name in ("wrapped.pt", "wrapped.safetensors"):
        loaded = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        qt.load_checkpoint(loaded, tmp_path / name)
        assert same(model, loaded)


@each_kind
def test_a_model_of_one_submodule_with_the_name_of_a_wrappers_loads_its_own(tmp_path: Path, kind: str) -> None:
    model, loaded = (nn.ModuleDict({"module": nn.Linear(2, 2)}) for _ in range(2))
    torch.save(model.state_dict(), tmp_path / "own.pt")
    save_file(model.state_dict(), tmp_path / "own.safetensors")
    qt.save_checkpoint(model, tmp_path / kind)
    for name in ("own.pt", "own.safetensors", kind):
        nn.init.zeros_(loaded["module"].weight)
        qt.load_checkpoint(loaded, tmp_path / name)
        assert same(model, loaded)


def test_what_is_no_path_to_load() -> None:
    for path, words in (
        (None, "got None"),
        ("", "got ''"),
        (3, "got 3"),
        ({}, "load a state dict with model.load_state_dict"),
    ):
        with pytest.raises(
            TypeError, match=f"^load_checkpoint: path must be a file or a folder of save_checkpoint.*{words}"
        ):
            qt.load_checkpoint(nn.Linear(2, 2), path)


# ---- what is refused, with the model untouched


def refused(path: Path, message: str, model: nn.Module | None = None, **options: Any) -> None:
    model = prepared_net() if model is None else model
    before = everything(model)
    with pytest.raises(ValueError, match=message) as raised:
        qt.load_checkpoint(model, path, **options)
    assert str(raised.value).startswith(f"load_checkpoint: {str(path)!r}: ")
    pairs = zip(before, everything(model), strict=True)
    assert all(torch.allclose(one, other, rtol=0, atol=0, equal_nan=True) for one, other in pairs)


@each_kind
def test_names_that_only_one_side_has(tmp_path: Path, kind: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Linear(4, 2))
    qt.save_checkpoint(model, tmp_path / kind)
    other = nn.ModuleDict({"0": model[0], "1x": nn.Linear(4, 2)})
    refused(
        tmp_path / kind, r"the model has no .*'1.weight' \(did you mean '1x.weight'\?\).*; it has no '1x.weight'", other
    )
    found = qt.load_checkpoint(other, tmp_path / kind, strict=False)
    assert (found.missing, tuple(sorted(found.unexpected))) == (("1x.weight", "1x.bias"), ("1.bias", "1.weight"))
    assert "not in the model: 1." in str(found)
    refused(
        tmp_path / kind,
        r"'1.weight' has shape \(2, 4\), in the model \(3, 4\)",
        nn.Sequential(model[0], nn.Linear(4, 3)),
    )


@each_kind
def test_another_config_is_named(tmp_path: Path, kind: str) -> None:
    qt.save_checkpoint(prepared_net(), tmp_path / kind)
    refused(
        tmp_path / kind,
        "1 quantizers have another config in it: 'conv.weight_quantizer' has bits=8, in the model bits=4",
        bits_of_conv(4),
    )
    refused(
        tmp_path / kind, "It was prepared for backend 'tensorrt10', the model for 'openvino'", prepared_net("openvino")
    )


def bits_of_conv(bits: int) -> nn.Module:
    mapping = qt.QConfigMapping().set_module_name("conv", qt.QConfig(qt.QuantSpec(), qt.QuantSpec(bits=bits, axis=0)))
    return qt.prepare(Net(), X, backend="tensorrt10", qconfig_mapping=mapping)


@each_kind
def test_what_fails_while_loading_brings_all_back(tmp_path: Path, kind: str) -> None:
    class Stubborn:
        loaded = 0

        def state_dict(self) -> dict[str, int]:
            return {"loaded": self.loaded}

        def load_state_dict(self, state: dict[str, int]) -> None:
            self.loaded += 1
            if self.loaded == 1:
                raise ValueError("not today")

    model = prepared_net()
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    qt.save_checkpoint(model, tmp_path / kind, optimizer, {"it": Stubborn()})
    model(X).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    refused(tmp_path / kind, "not today", model, optimizer=optimizer, state={"it": Stubborn()})
    assert str(state) == str(optimizer.state_dict())


@each_kind
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("copy", [loading.COPY, loading.copy_each])
def test_parameters_keep_their_memory_which_is_written_last(
    tmp_path: Path, kind: str, fails: bool, copy: Callable[..., object], monkeypatch
) -> None:
    """A tied weight, one in channels_last, one of another type, and a view of a larger tensor, with a hook that looks."""
    monkeypatch.setattr(loading, "COPY", copy)
    model, seen = parameters_of_all_kinds(), []
    qt.save_checkpoint(model, tmp_path / kind)
    model[2].bias.data = model[2].bias.double()
    first, memory = everything(model), [(p.data_ptr(), p.stride()) for p in model.parameters()]
    views = [p.detach() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    changed = everything(model)

    def look(module: nn.Module, keys: object) -> None:
        seen.append([torch.equal(p, was) for p, was in zip(module.parameters(), first, strict=True)])
        seen.append([torch.equal(v, now) for v, now in zip(views, changed, strict=True)])
        if fails:
            raise ValueError("not today")

    model.register_load_state_dict_post_hook(look)
    with pytest.raises(ValueError, match="not today") if fails else nullcontext():
        qt.load_checkpoint(model, tmp_path / kind)
    assert seen == [[True] * 5, [True, True, True, True, False]]  # a value of another type is converted in place
    assert [(p.data_ptr(), p.stride()) for p in model.parameters()] == memory
    for p, view, wanted in zip(model.parameters(), views, changed if fails else first, strict=True):
        assert torch.equal(p, wanted)
        assert torch.equal(view, wanted)


@each_kind
def test_a_model_none_of_whose_parameters_has_the_type_of_its_value(tmp_path: Path, kind: str) -> None:
    model = nn.Linear(4, 2)
    qt.save_checkpoint(model, tmp_path / kind)
    other = nn.Linear(4, 2).double()
    qt.load_checkpoint(other, tmp_path / kind)
    assert same(model.double(), other)


def parameters_of_all_kinds() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(3, 4, 2).to(memory_format=torch.channels_last), nn.Linear(4, 4), nn.Linear(4, 4))
    model[2].weight = model[1].weight
    model[1].bias = nn.Parameter(torch.randn(2, 8)[1, 2:6])
    return model


@each_kind
def test_another_optimizer_or_state_is_named(tmp_path: Path, kind: str) -> None:
    model = prepared_net()
    adam = torch.optim.Adam(model.parameters())
    rate = torch.optim.lr_scheduler.ConstantLR(adam)
    qt.save_checkpoint(model, tmp_path / kind, adam, {"rate": rate, "epoch": 1})
    path = tmp_path / kind
    refused(path, "its optimizer is Adam, got SGD", model, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    refused(
        path,
        "only one of the two trains weight",
        model,
        optimizer=torch.optim.Adam([p for n, p in model.named_parameters() if n != "weight"]),
    )
    refused(path, "their groups or their order differ", model, optimizer=torch.optim.Adam([*model.parameters()][::-1]))
    refused(path, "unknown name in state 'rat'; did you mean 'rate'", model, state={"rat": rate})
    refused(path, r"state\['epoch'\] was saved as a plain value", model, state={"epoch": rate})
    qt.save_checkpoint(model, path)
    refused(path, "it holds no optimizer", model, optimizer=adam)
    with pytest.raises(ValueError, match="2 parameters that are not in the model"):
        qt.save_checkpoint(model, path, torch.optim.Adam(nn.Linear(2, 2).parameters()))
    with pytest.raises(TypeError, match=r"state\['rates'\] holds a set; a checkpoint holds numbers"):
        qt.save_checkpoint(model, path, state={"rates": {1, 2}})
    with pytest.raises(TypeError, match="state must be a mapping of names"):
        qt.save_checkpoint(model, path, state=[rate])
    with pytest.raises(FileNotFoundError, match="there is no file or folder"):
        qt.load_checkpoint(model, tmp_path / "lost")


class Harmful:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch harmed",)


def test_pickles_of_code_are_never_run(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / ".metadata").write_bytes(pickle.dumps(Harmful()))
    torch.save({"weight": Harmful()}, "harmful.pt")
    (tmp_path / "harmful.bin").write_bytes(pickle.dumps(Harmful(), protocol=2))
    torch.save(prepared_net(), "model.pt")
    for name in ("harmful.pt", "harmful.bin", "model.pt"):
        refused(Path(name), "does not hold only tensors .* Other pickles can execute arbitrary code and are not loaded")
    refused(Path("folder"), r"not a complete checkpoint of save_checkpoint. Its .metadata is a pickle")
    refused(Path("model.pt"), r"only tensors \(it holds qtoolkit\.graph\.restore_graph_module\)")
    (tmp_path / "text.pt").write_text("no pickle")
    refused(Path("text.pt"), r"only tensors \(torch\.load raises \w+Error\)")
    torch.save([1, 2], "numbers.pt")
    refused(Path("numbers.pt"), "it holds no state dict")
    assert not Path("harmed").exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_truncated_files_are_refused(tmp_path: Path, share: float) -> None:
    for kind in KINDS:
        qt.save_checkpoint(prepared_net(), tmp_path / kind)
    data = next((tmp_path / "last").glob("data-*/*.safetensors"))
    for file, opened in ((tmp_path / "last.safetensors",) * 2, (data, tmp_path / "last")):
        content = file.read_bytes()
        file.write_bytes(content[: int(share * len(content))])
        refused(opened, "complete safetensors file|bytes, but had|its files")
    data.unlink()
    refused(tmp_path / "last", r"is missing, but had \d+ bytes when")


def record_of(path: Path) -> dict[str, Any]:
    if path.is_dir():
        return json.loads((path / "checkpoint.json").read_bytes())
    with safetensors.safe_open(path, framework="pt") as file:
        return json.loads(file.metadata()["qtoolkit"])


def rewrite(path: Path, record: object) -> None:
    text = record if isinstance(record, str) else json.dumps(record)
    if path.is_dir():
        (path / "checkpoint.json").write_text(text)
    else:
        save_file(load_file(path), path, {"qtoolkit": text})


@each_kind
def test_hostile_records_are_refused(tmp_path: Path, kind: str) -> None:
    path, model = tmp_path / kind, prepared_net()
    optimizer = torch.optim.Adam(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    qt.save_checkpoint(model, path, optimizer, {"epoch": 1})
    good = record_of(path)
    refused_record = lambda record: (rewrite(path, record), refused(path, ".", model, optimizer=optimizer))  # noqa: E731
    for record in ("", "{", "[" * 100_000, "[]", "null", "3"):
        refused_record(record)
    rewrite(path, {**good, "version": 99, "qtoolkit": "7.0"})
    refused(path, "it has version 99, written by qtoolkit 7.0; this qtoolkit reads versions up to 1")
    for name in good:
        refused_record({key: value for key, value in good.items() if key != name})
        for value in (-1, "x", [1], {"a": 1}, [{"tuple": 3}], {"dict": [[1]]}, {"tensor": "weight"}):
            rewrite(path, {**good, name: value})
            with suppress(ValueError, RuntimeError):
                qt.load_checkpoint(model, path, optimizer)  # some fields may have other values
    rewrite(path, good)
    qt.load_checkpoint(model, path, optimizer)
    if path.is_dir():
        for data in ("..", "/tmp", "data-../../x", good["data"] + "/.."):
            refused_record({**good, "data": data})


# ---- faults


@each_kind
def test_a_full_disk_and_a_read_only_folder_leave_the_old_checkpoint(tmp_path: Path, kind: str) -> None:
    small, large = nn.Linear(2, 2), nn.Linear(2, 1 << 16)
    qt.save_checkpoint(small, tmp_path / kind)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, limit[1]))
        with pytest.raises((OSError, RuntimeError), match="save_checkpoint"):
            qt.save_checkpoint(large, tmp_path / kind)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    other = nn.Linear(2, 2)
    qt.load_checkpoint(other, tmp_path / kind)
    assert same(small, other)
    assert len([*tmp_path.rglob("*.safetensors")]) == 1


def test_two_processes_that_save_into_one_folder_leave_the_later_checkpoint(tmp_path: Path, monkeypatch) -> None:
    earlier, later, write = nn.Linear(2, 2), nn.Linear(2, 2), folder.write_atomically

    def overtaken(data: bytes, path: Path) -> None:
        write(data, path)
        monkeypatch.setattr(folder, "write_atomically", write)
        qt.save_checkpoint(later, path.parent)

    qt.save_checkpoint(nn.Linear(2, 2), tmp_path / "last")
    monkeypatch.setattr(folder, "write_atomically", overtaken)
    qt.save_checkpoint(earlier, tmp_path / "last")
    qt.load_checkpoint(earlier, tmp_path / "last")
    assert same(earlier, later)
    assert len([*(tmp_path / "last").glob("data-*")]) == 1


def test_an_error_behind_the_index_leaves_the_new_checkpoint(tmp_path: Path, monkeypatch) -> None:
    model, write = nn.Linear(2, 2), folder.write_atomically

    def interrupted(data: bytes, path: Path) -> None:
        write(data, path)
        raise KeyboardInterrupt

    qt.save_checkpoint(nn.Linear(2, 2), tmp_path / "last")
    with monkeypatch.context() as patch:
        patch.setattr(folder, "write_atomically", interrupted)
        with pytest.raises(KeyboardInterrupt):
            qt.save_checkpoint(model, tmp_path / "last")
    loaded = nn.Linear(2, 2)
    qt.load_checkpoint(loaded, tmp_path / "last")
    assert same(model, loaded)


KILLED = """
import os, signal, sys
from pathlib import Path
import qtoolkit as qt
from qtoolkit.checkpoint import loading
import torch.distributed.checkpoint
from torch import nn

for path in sys.argv[1:]:
    qt.save_checkpoint(nn.Linear(2, 2), path)
    child = os.fork()
    if not child:
        Path.replace = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
        qt.save_checkpoint(nn.Linear(2, 3), path)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


@pytest.mark.slow
def test_a_killed_save_leaves_the_old_checkpoint_and_the_next_one_cleans_up(tmp_path: Path) -> None:
    paths = [tmp_path / kind / kind for kind in KINDS]
    processes.python("-c", KILLED, *paths).check_returncode()
    for path, left, complete in zip(paths, (2, 7), (1, 4), strict=True):
        assert len([*path.parent.rglob("*")]) == left
        model = nn.Linear(2, 2)
        qt.load_checkpoint(model, path)
        qt.save_checkpoint(model, path)
        assert len([*path.parent.rglob("*")]) == complete
        qt.load_checkpoint(nn.Linear(2, 2), path)
