"""Several processes: ranges are those of all data and equal bit for bit, and checkpoints go from any number to any other."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import qtoolkit as qt
from tests import processes
from tests.distributed import ranks
from tests.training.nets import Net, quantized

pytest.importorskip("safetensors")
Results = dict[int, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("needs torch.distributed with gloo")
    folder = tmp_path_factory.mktemp("ranks")
    torch.manual_seed(3)
    torch.save(Net().state_dict(), folder / "float.pt")
    for size in (4, 2):
        processes.spawn(ranks.work, (size, str(folder)), size)
    return folder


@pytest.fixture(scope="module")
def results(folder: Path) -> Iterator[Results]:
    """What each rank found, by the number of ranks, each with one thread; and one thread here."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {size: [torch.load(folder / f"{size}.{r}.pt", weights_only=True) for r in range(size)] for size in (2, 4)}
    torch.set_num_threads(threads)


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.slow
def test_a_sharded_loader_calibrates_as_one_process_does(results: Results, size: int) -> None:
    torch.manual_seed(0)
    model = quantized("graph", "fixed").eval()
    qt.calibrate(model, ranks.images().split(1), progress=False)
    for found in results[size]:
        assert_same(found["calibrated"], ranks.ranges(model))


@pytest.mark.parametrize("idle", [False, True], ids=["shares", "one rank has no data"])
@pytest.mark.parametrize("observer", ["minmax", "histogram"])
@pytest.mark.slow
def test_a_block_that_calibrates_sees_the_data_of_all_ranks(results: Results, observer: str, idle: bool) -> None:
    torch.manual_seed(0)
    model = quantized("graph", "fixed", observer=observer).eval()
    before = ranks.ranges(model)
    with torch.no_grad(), qt.calibrating(model):
        for image in ranks.images().split(1):
            model(image)
    assert any(not torch.equal(before[name], scale) for name, scale in ranks.ranges(model).items())
    for found in (*results[2], *results[4]):
        assert_same(found["blocks"][observer, idle], ranks.ranges(model))


@pytest.mark.parametrize("observer", ranks.OBSERVERS)
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.slow
def test_a_phase_that_observes_sees_the_data_of_all_ranks(results: Results, size: int, observer: str) -> None:
    """DistributedDataParallel gives all ranks the buffers of rank 0 before each forward: nothing of the others may be lost."""
    name = "activation_quantizers.x"
    for found in results[size]:
        assert torch.equal(found["phases"][observer][name], results[size][0]["phases"][observer][name])
    torch.manual_seed(0)
    model = quantized("graph", "fixed", observer=observer)
    qt.calibrate(model, list(ranks.batches()), progress=False)
    one, all_data = results[size][0]["phases"][observer][name], model.get_submodule(name).scale
    if observer != "moving_average":
        torch.testing.assert_close(one, all_data, rtol=1e-6, atol=0)


@pytest.mark.slow
def test_moving_ranges_are_kept_equal_by_the_mean_of_all_ranks(results: Results) -> None:
    one, other = (found["moving"] for found in results[2])
    for each in one:
        assert_same(one[each]["ranges"], other[each]["ranges"])
        assert torch.equal(one[each]["codes"], other[each]["codes"])
    for (before, mine), (before_other, theirs) in zip(one[1, True]["seen"], other[1, True]["seen"], strict=True):
        assert torch.equal(before, before_other)
        assert not torch.equal(mine, theirs)
    last = [found["moving"][1, True]["seen"][-1][1].double() for found in results[2]]
    assert torch.equal(one[1, True]["observed"], (sum(last) / 2).float())


@pytest.mark.slow
def test_ranks_with_other_numbers_of_steps_quantize_alike(results: Results) -> None:
    one, other = (found["accumulated"] for found in results[2])
    for found, wanted in zip(other, one, strict=True):
        assert_same(found, wanted)
    for first, second in zip(one[::2], one[1::2], strict=True):  # the batches of a step
        assert_same(second, first)


@pytest.mark.slow
def test_ranges_that_add_up_are_refused(results: Results) -> None:
    assert (
        "quantizer 'activation_quantizers.x' has the observer 'histogram', which accumulates its input"
        in results[2][0]["refusal"]
    )


def test_one_process_needs_no_synchronization() -> None:
    model = ranks.observing()
    before = ranks.ranges(model)
    qt.synchronize_ranges(model)
    assert_same(ranks.ranges(model), before)


@pytest.mark.parametrize("name", ["ddp", "ddp.safetensors", "fsdp"])
@pytest.mark.slow
def test_a_training_of_two_ranks_resumes_bit_for_bit(results: Results, name: str) -> None:
    for found in results[2]:
        assert found["resumed"][name]["random"]
        assert_same(found["resumed"][name]["other"], found["resumed"][name]["one"])


@pytest.mark.slow
def test_what_four_ranks_save_two_load_and_train_on(results: Results) -> None:
    wanted = results[4][0]
    for found in results[2]:
        assert not found["random"]  # generators are those of another number of processes
        assert_same(found["saved"], wanted["saved"])
        assert_same(found["trained"], wanted["trained"])


@pytest.mark.slow
def test_what_four_ranks_save_one_process_loads_and_converts(results: Results, folder: Path) -> None:
    model = quantized("graph", "lsq")
    optimizer = ranks.adam(model)
    qt.load_checkpoint(model, folder / "sharded", optimizer)
    assert_same(model.state_dict(), results[4][0]["saved"])
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    qt.convert(model)


@pytest.mark.slow
def test_a_float_file_is_loaded_into_shards(results: Results, folder: Path) -> None:
    wanted = torch.load(folder / "float.pt", weights_only=True)
    for found in results[2]:
        assert_same({name: found["float"][name] for name in wanted}, wanted)


@pytest.mark.slow
def test_a_sharded_model_is_evaluated(results: Results) -> None:
    for found in results[2]:
        assert found["eval"] == {"fixed": True, "lsq": True}


@pytest.mark.slow
def test_an_error_on_one_rank_is_told_to_all(results: Results) -> None:
    one, other = (found["errors"] for found in results[2])
    assert "load_checkpoint failed on rank 1: load_checkpoint: there is no file" in one[0]
    assert "there is no file" in other[0]
    assert "holds a set" in one[1]
    assert "save_checkpoint failed on rank 0: save_checkpoint: state['a'] holds a set" in other[1]
    for told in (one, other):
        assert "/proc/none" in told[2]
        assert "/proc/none" in told[3]
        assert "is sharded over processes, but" in told[4]
        assert "load it before fully_shard" in told[5]
