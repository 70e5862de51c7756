"""SyncBatchNorm in two processes: what one process has with a batch norm on all data, by units, one by one, and mixed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import qtoolkit as qt
from tests import processes
from tests.distributed import sync_ranks as ranks

Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Results]:
    """What each rank found."""
    with processes.found_by_ranks(ranks.work, ranks.SIZE, tmp_path_factory.mktemp("ranks")) as found:
        yield found


def joined(shares: list[dict[str, Tensor]], name: str, of_images: bool, bound: float = 0) -> Tensor:
    """What all ranks have, or what each of them has."""
    if of_images:
        return torch.cat([share[name] for share in shares])
    for share in shares[1:]:
        torch.testing.assert_close(share[name], shares[0][name], rtol=bound, atol=bound, msg=name)
    return shares[0][name]


def assert_near(found: Tensor, wanted: Tensor, name: str, bound: float) -> None:
    """Equal within sums in another order: a share of the largest value."""
    if not wanted.is_floating_point():
        assert torch.equal(found, wanted), name
        return
    assert found.shape == wanted.shape, name
    largest = float(wanted.abs().max()) if wanted.numel() else 0.0
    least = bound * max(largest, 1e-3)
    torch.testing.assert_close(found, wanted, rtol=bound, atol=least, msg=lambda m: f"{name}: {m}")


def assert_all_near(
    shares: list[dict[str, Tensor]], wanted: dict[str, Tensor], bound: float = 2e-4, between_ranks: float = 0
) -> None:
    assert all(share.keys() == wanted.keys() for share in shares)
    for name, value in wanted.items():
        if name.endswith(".bias") and not name.startswith("buffer") and bool((value == 0).all()):
            continue  # of a layer: zero here, and the rounding of a sum over images one by one
        assert_near(joined(shares, name, name.startswith(("y ", "x ")), between_ranks), value, name, bound)


@pytest.mark.parametrize("route", ["units", "one by one"])
@pytest.mark.parametrize("name", ranks.CASES)
@pytest.mark.slow
def test_two_ranks_compute_what_one_process_does(results: Results, name: str, route: str) -> None:
    """Results, gradients of the input, the sums of all gradients of parameters, running statistics and ranges."""
    wanted = ranks.steps(name, ranks.prepared_of(name, sync=False), None)
    assert_all_near([found[name][route] for found in results], wanted, 1e-9 if name == "float64" else 2e-4)


@pytest.mark.parametrize("name", ranks.CASES)
@pytest.mark.slow
def test_a_rank_has_the_gradients_of_the_ops_one_by_one(results: Results, name: str) -> None:
    """Its own ones, not only their sums: ranks may call different ops."""
    for found in results:
        wanted = found[name]["one by one own"]
        for each, value in found[name]["units own"].items():
            assert_near(value, wanted[each], each, 1e-9 if name == "float64" else 1e-3)


@pytest.mark.parametrize("name", ranks.CASES)
@pytest.mark.slow
def test_a_unit_is_one_op_on_every_rank(results: Results, name: str) -> None:
    norms = 5
    wanted = 0 if name == "cumulative" else norms * ranks.STEPS  # its momentum is another one at each step
    for found in results:
        assert (found[name]["units by op"], found[name]["one by one by op"]) == (wanted, 0)


@pytest.mark.parametrize("name", ranks.CASES)
@pytest.mark.slow
def test_state_dicts_load_into_a_model_of_one_process(results: Results, name: str) -> None:
    model = ranks.prepared_of(name, sync=False)
    state = results[0][name]["units state"]
    assert state.keys() == model.state_dict().keys()
    model.load_state_dict(state)
    x = ranks.images().to(next(model.parameters()).dtype)
    assert torch.equal(model.eval()(x), results[0][name]["units in eval"])
    assert torch.equal(results[0][name]["units in eval"], results[1][name]["units in eval"])


@pytest.mark.slow
def test_the_op_gives_codes_and_gradients_of_all_ranks(results: Results) -> None:
    wanted, shares = ranks.one_op(None), [found["op"] for found in results]
    for name, value in wanted.items():
        if name == "codes":
            assert torch.equal(joined(shares, name, True), value)
        elif name == "divisor":  # of each rank's far larger ones next to nothing remains
            largest = max(float(share["own divisor"].abs().max()) for share in shares)
            assert float((joined(shares, name, False) - value).abs().max()) < 1e-5 * largest
        elif name != "own divisor":
            assert_near(joined(shares, name, name in ("y", "x", "residual")), value, name, 1e-5)


@pytest.mark.slow
def test_the_op_gives_the_gradient_of_each_ranks_divisor(results: Results) -> None:
    """That of a division before a batch norm over all ranks, by autograd in float64."""
    x, residual, grad = (t.double() for t in ranks.operands())
    weight, bias = torch.linspace(-1, 2, 5).double(), torch.linspace(0, 1, 5).double()
    divisors = [torch.linspace(1, -2, 5).double().requires_grad_() for _ in results]
    shares = zip(x.split([1, 7]), divisors, strict=True)
    divided = torch.cat([share / divisor.view(1, -1, 1, 1) for share, divisor in shares])
    y = nn.functional.batch_norm(divided, None, None, weight, bias, training=True) + residual
    step, zero_point = 0.05, 7
    codes = (y.relu() / step).round() + zero_point
    passed = grad * ((codes >= 0) & (codes <= 100) & (y > 0))
    y.backward(passed)
    for found, divisor in zip(results, divisors, strict=True):
        assert_near(found["op"]["own divisor"].double(), divisor.grad, "divisor", 1e-4)


@pytest.mark.slow
def test_a_hook_on_one_rank_leaves_no_rank_waiting(results: Results) -> None:
    """It has its own route, with the same all-reduces."""
    wanted = ranks.steps("fixed", ranks.prepared_of("fixed", sync=False), None)
    for name in ("second.1", "second.0", None):
        mixed = [
            {key: value for each, value in found["watched"].items() if (key := each.removeprefix(f"{name} ")) != each}
            for found in results
        ]
        assert_all_near(mixed, wanted, between_ranks=1e-5)


@pytest.mark.slow
def test_without_its_group_a_model_waits_for_nobody(results: Results) -> None:
    alone = results[0]["alone"]
    assert torch.equal(alone["units"], alone["one by one"])


@pytest.mark.parametrize(("test", "one", "other"), [("compiled", "eager", "compiled"), ("sharded", "whole", "sharded")])
@pytest.mark.slow
def test_compiled_as_a_whole_and_sharded(results: Results, test: str, one: str, other: str) -> None:
    for found in results:
        of = {
            way: {k.removeprefix(f"{way} "): v for k, v in found[test].items() if k.startswith(way)}
            for way in (one, other)
        }
        assert of[one].keys() == of[other].keys()
        for name, value in of[one].items():
            assert_near(of[other][name], value, name, 2e-4)


@pytest.mark.slow
def test_replaced_modules(results: Results) -> None:
    shares, wanted = [found["replaced"] for found in results], ranks.replaced(None)
    for name, value in wanted.items():
        assert_near(joined(shares, name, name in ("y", "x")), value, name, 2e-4)


@pytest.mark.slow
def test_groups(results: Results) -> None:
    for found in results:
        one, everyone, default = (found["groups"][name] for name in ("one", "all", "default"))
        assert not one["shared"]
        assert one["report"] == "computed by torch: a SyncBatchNorm without a process group of several ranks"
        assert everyone["same"]
        assert default["same"]
        assert everyone["report"] == default["report"] == "fused with stem.2; 2 ops take 'stem_2'"
        assert torch.equal(everyone["mean"], default["mean"])


def test_one_process_has_the_bits_of_torch() -> None:
    """As without a group: the modules one by one, in which the batch norm is torch's."""
    model, plain = (ranks.prepared_of("fixed", sync=sync) for sync in (True, False))
    x = ranks.images()
    found = model(x)
    with ranks.called_one_by_one():
        assert torch.equal(found, plain(x))


def test_a_batch_norm_without_a_layer_is_torchs() -> None:
    prepared = qt.prepare(nn.Sequential(nn.ReLU(), nn.SyncBatchNorm(3), nn.Conv2d(3, 4, 1)).train(), backend="tensorrt")
    (line,) = (line for line in qt.quantization_report(prepared).layers if line.name == "1")
    assert line.training == "computed by torch: a SyncBatchNorm that no layer is linked to"


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_each_rank_has_what_torchs_module_gives_it(tmp_path: Path) -> None:
    processes.spawn(ranks.work_on_gpu, (str(tmp_path),), ranks.SIZE)
    for rank in range(ranks.SIZE):
        for found in torch.load(tmp_path / f"{rank}.pt", weights_only=True).values():
            assert found["ours"].keys() == found["torch"].keys()
            for name, value in found["torch"].items():
                assert_near(found["ours"][name], value, name, 2e-4)
