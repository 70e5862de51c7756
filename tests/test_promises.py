"""What each step of the way promises, and the test that shows it; those tests that had no other place are here."""

import copy
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import qtoolkit as qt
from tests import nets, processes, ranks

SHAPE = (4, 3, 8, 8)

# Step and promise -> the tests, as module.function.
PROMISES = {
    "trace: same outputs, same parameter names": (
        "graph.capture.test_trace.test_trace_keeps_outputs_and_parameter_names"
    ),
    "trace: an error names the source line and the remedy": (
        "test_prepare.test_an_untraceable_model_is_told_the_line_and_the_remedy",
        "graph.capture.test_trace_errors.test_following_the_advice_ends_in_success",
    ),
    "fuse: eval output equal to 1e-6": "graph.passes.test_link_batch_norms.test_fuse_eval_output_equal_to_1e_6",
    "fuse: train output equal": "graph.passes.test_link_batch_norms.test_fuse_train_output_equal",
    "fuse: chains with a second user untouched": (
        "graph.passes.test_link_batch_norms.test_fuse_leaves_chains_with_a_second_user_untouched"
    ),
    "swap: quantizers off, bit-equal to before": "graph.passes.test_swap.test_swap_is_bit_equal_with_quantizers_off",
    "swap: the float state_dict loads": "graph.passes.test_swap.test_the_float_state_dict_loads_after_swap",
    "swap: what was left float is listed": "graph.passes.test_swap.test_what_was_left_float_is_listed_with_the_reason",
    "insert: every wanted edge has one quantizer, no other has": (
        "test_prepare.test_every_wanted_edge_has_one_quantizer_on_tensorrt",
        "graph.passes.test_insert.test_every_quantizer_is_in_the_plan",
        "test_promises.test_insert_quantizes_the_edges_of_the_plan_and_no_others",
    ),
    "insert: shared where the backend says so": "graph.passes.test_insert.test_connected_concats_share_one_quantizer",
    "calibrate: quantizers never reached are named": "test_calibrate.test_quantizers_without_data_are_named",
    "calibrate: independent of batch split": "test_calibrate.test_ranges_do_not_depend_on_the_split_into_batches",
    "calibrate: all ranks agree": "test_promises.test_calibrate_all_ranks_agree",
    "train: scales positive and finite": (
        "test_promises.test_train_scales_stay_positive_and_finite",
        "quantizers.test_tensor_quantizer.test_a_scale_is_positive_for_every_value_of_its_parameter",
    ),
    "train: compile without graph breaks": "test_prepare.test_training_compiles_without_graph_breaks",
    "train: deepcopy and pickle work": "test_prepare.test_copies_compute_and_train_the_same",
    "train: EMA works": "test_promises.test_train_ema_works",
    "train: DDP works": "test_promises.test_train_ddp_is_the_step_of_one_process",
    "train: resume works": "test_promises.test_train_resumed_is_train_without_a_break",
    "train: what ordinary scripts do": (
        "training.test_scripts.test_copies_train_the_same",
        "training.test_scripts.test_an_average_is_evaluated_at_any_time",
        "training.test_scripts.test_accumulated_gradients_are_those_of_the_larger_batch",
        "training.test_scripts.test_a_checkpointed_training_is_the_plain_one",
        "training.test_scripts.test_a_resumed_training_goes_on_bit_for_bit",
        "training.test_scripts.test_a_training_compiles_once_for_each_mode",
        "training.test_parameter_groups.test_optimizers_and_schedulers_take_the_groups",
    ),
    "train: mixed precision": "training.test_amp.test_every_layer_computes_in_the_float_layers_dtype",
    "train: NaN ends with the name of the quantizer": (
        "debug.test_watch.test_a_loss_that_is_nan_names_the_first_quantizer"
    ),
    "train: BN freezable": "nn.test_batch_norm.test_frozen_batch_norms_keep_their_statistics_and_train_gamma",
    "convert: equal to the fake-quant model in eval": (
        "graph.passes.test_swap.test_convert_equals_the_fake_quant_model_in_eval"
    ),
    "convert: BN folded, no observer state": (
        "graph.passes.test_swap.test_convert_folds_batch_norms_and_leaves_no_observer_state"
    ),
    "convert: forward_fp32": "graph.passes.test_swap.test_convert_puts_forward_fp32_beside_every_quantized_layer",
    "export: codes equal": "export.test_onnx.test_codes_in_onnxruntime_are_those_of_training",
    "export: the Q/DQ list equals the plan": "export.test_onnx.test_the_pairs_are_those_of_the_plan",
    "export: onnx.checker passes": "test_promises.test_export_passes_the_checker",
    "all: shared modules stay shared": "test_prepare.test_shared_layers_stay_shared",
    "all: the user's model is never changed": "test_prepare.test_the_users_model_is_not_changed",
    "all: passing twice changes nothing": "test_prepare.test_passing_twice_changes_nothing",
    "all: a failing pass leaves the user's model untouched and names the node": (
        "test_prepare_safety.test_a_failing_pass_leaves_the_users_model_untouched",
        "graph.passes.test_insert.test_a_spec_that_does_not_fit_a_functions_weight_names_the_node",
    ),
    "bad input: unknown keys": "test_config.test_bad_values_are_named",
    "bad input: types that are no modules": "graph.passes.test_insert.test_types_that_are_no_modules_are_refused",
    "bad input: names and patterns that cannot match": (
        "test_prepare.test_unknown_names_say_the_nearest",
        "graph.passes.test_link_batch_norms.test_bad_patterns_leave_the_model_untouched",
    ),
    "bad input: mappings to classes without from_float": (
        "graph.passes.test_swap.test_bad_mappings_leave_the_model_untouched"
    ),
    "batch norm: a linear layer's on inputs of three dimensions": (
        "nn.test_batch_norm.test_without_example_inputs_as_many_channels_as_the_length_are_an_error_with_a_remedy",
        "nn.test_batch_norm.test_a_batch_norm_of_other_channels_is_not_linked",
    ),
}
NAMES = [
    (promise, name) for promise, tests in PROMISES.items() for name in ([tests] if isinstance(tests, str) else tests)
]


def target_of(name: str) -> str:
    """The target of the Makefile that runs a test: make test runs those that are not slow, make test-all every one."""
    module, _, function = name.rpartition(".")
    test = getattr(import_module(f"tests.{module}"), function)
    marks = [*getattr(import_module(f"tests.{module}"), "pytestmark", ()), *getattr(test, "pytestmark", ())]
    sweeps = [mark for mark in marks if mark.name == "sweep" and not mark.args]
    return "test-all" if sweeps or any(mark.name == "slow" for mark in marks) else "test"


@pytest.mark.parametrize(("promise", "name"), NAMES, ids=[f"{promise}-{name}" for promise, name in NAMES])
def test_each_promise_has_its_test(promise: str, name: str) -> None:
    module, _, function = name.rpartition(".")
    assert callable(getattr(import_module(f"tests.{module}"), function, None)), f"{promise}: there is no {name}"


@pytest.mark.parametrize("promise", PROMISES)
def test_make_test_has_a_test_of_each_promise(promise: str) -> None:
    assert "test" in [target_of(name) for promised, name in NAMES if promised == promise]


# ---- insert


@pytest.mark.parametrize("backend", list(qt.backends))
def test_insert_quantizes_the_edges_of_the_plan_and_no_others(backend: str) -> None:
    prepared = qt.prepare(nets.ConvNet(), backend=backend)
    prepared.graph.lint()
    planned = {(edge.quantizer, edge.source) for edge in prepared.plan.edges}
    activations = [n for n in prepared.graph.nodes if str(n.target).startswith("activation_quantizers.")]
    inserted = [(node.target, node.args[0].name) for node in activations]
    weights = [f"{name}.weight_quantizer" for name, m in prepared.named_modules() if hasattr(m, "weight_quantizer")]
    inserted += [(name, name.removesuffix("_quantizer")) for name in weights]
    assert sorted(inserted) == sorted(planned)  # each tensor once
    for node in activations:
        assert node.args[0] not in activations


# ---- train


def learning() -> qt.QConfigMapping:
    return qt.QConfigMapping().set_global(
        qt.QConfig(qt.QuantSpec(quantizer="lsq"), qt.QuantSpec(axis=0, quantizer="lsq"))
    )


def trainable() -> nn.Module:
    torch.manual_seed(0)
    prepared = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE).train(), qconfig_mapping=learning(), backend="tensorrt")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    return prepared.train()


def take_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()


def scales(model: nn.Module) -> dict[str, Tensor]:
    return {name: quantizer.scale for name, quantizer in qt.quantizers_of(model).items()}


def test_train_scales_stay_positive_and_finite() -> None:
    """Steps so large that some parameters go through zero."""
    prepared = trainable()
    learned = [p for quantizer in qt.quantizers_of(prepared).values() for p in quantizer.parameters()]
    optimizer = torch.optim.Adam(learned, 0.2)
    crossed = False
    for _ in range(12):
        take_step(prepared, optimizer, torch.randn(SHAPE))
        crossed = crossed or any(bool((p < 0).any()) for p in learned)
        for name, scale in scales(prepared).items():
            assert bool((torch.isfinite(scale) & (scale > 0)).all()), name
    assert crossed
    assert bool(qt.convert(prepared)(torch.randn(SHAPE)).isfinite().all())


def test_train_ema_works() -> None:
    prepared = trainable()
    ema = AveragedModel(prepared, multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)
    optimizer = torch.optim.SGD(prepared.parameters(), 0.01)
    averages = {name: p.detach().clone() for name, p in prepared.named_parameters()}
    ema.update_parameters(prepared)  # the first one copies
    for _ in range(3):
        take_step(prepared, optimizer, torch.randn(SHAPE))
        ema.update_parameters(prepared)
        averages = {name: (averages[name] + p.detach()) / 2 for name, p in prepared.named_parameters()}
    for name, parameter in ema.module.named_parameters():
        torch.testing.assert_close(parameter.detach(), averages[name], rtol=1e-6, atol=1e-7)
    x = torch.randn(SHAPE)
    converted = qt.convert(ema.module)
    torch.testing.assert_close(converted(x), ema.eval()(x), rtol=1e-5, atol=1e-5)
    assert not torch.equal(converted(x), qt.convert(prepared)(x))


@pytest.mark.parametrize("sizes", [[8] * 6, [8, 8, 8, 12, 8, 16]], ids=["one size", "several sizes"])
def test_train_resumed_is_train_without_a_break(tmp_path, sizes: list[int]) -> None:
    """Model and optimizer come back from a file, into a model that was prepared anew and never calibrated."""
    batches = [torch.randn(*SHAPE[:2], size, size) for size in sizes]
    one = trainable()
    optimizer = torch.optim.Adam(one.parameters(), 1e-3)
    for x in batches[:3]:
        take_step(one, optimizer, x)
    torch.save({"model": one.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    for x in batches[3:]:
        take_step(one, optimizer, x)

    other = qt.prepare(nets.ConvNet().train(), qconfig_mapping=learning(), backend="tensorrt")
    resumed = torch.optim.Adam(other.parameters(), 1e-3)
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    other.load_state_dict(state["model"])
    resumed.load_state_dict(state["optimizer"])
    for x in batches[3:]:
        take_step(other, resumed, x)
    for name, value in one.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


# ---- two processes


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory) -> Iterator[list[dict[str, Any]]]:
    """What each rank found."""
    with processes.found_by_ranks(ranks.work, ranks.SIZE, tmp_path_factory.mktemp("ranks")) as found:
        yield found


def assert_equal_scales(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, scale in wanted.items():
        assert torch.equal(found[name], scale), name


@pytest.mark.parametrize("observer", ["minmax", "histogram", "pow2", "pow2_mode"])
def test_calibrate_all_ranks_agree(of_two_ranks, observer: str) -> None:
    """With each other, and with one process that has all the data."""
    wanted = ranks.calibrated_scales(observer, ranks.data())
    for found in of_two_ranks:
        assert_equal_scales(found[observer], wanted)


@pytest.mark.parametrize("observer", ["clip_std", "lsq"])
def test_calibrate_means_are_those_of_all_data(of_two_ranks, observer: str) -> None:
    """The last bit of a sum depends on the order of its terms."""
    wanted = ranks.calibrated_scales(observer, ranks.data())
    assert_equal_scales(*(found[observer] for found in of_two_ranks))
    for name, scale in wanted.items():
        torch.testing.assert_close(of_two_ranks[0][observer][name], scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("observer", ["moving_average", "moving_histogram"])
def test_calibrate_moving_averages_are_averaged_over_the_ranks(of_two_ranks, observer: str) -> None:
    one, other = (found[observer] for found in of_two_ranks)
    assert_equal_scales(one, other)
    halves = [ranks.calibrated_scales(observer, ranks.data()[rank :: ranks.SIZE]) for rank in range(ranks.SIZE)]
    name = "activation_quantizers.x"
    assert halves[0][name] != halves[1][name]
    assert min(half[name] for half in halves) <= one[name] <= max(half[name] for half in halves)


def test_calibrate_a_rank_without_data_takes_the_others_ranges(of_two_ranks) -> None:
    wanted = ranks.calibrated_scales("histogram", ranks.data())
    for found in of_two_ranks:
        assert_equal_scales(found["a rank without data"], wanted)


def test_calibrate_keeps_to_its_rank_if_asked_to(of_two_ranks) -> None:
    for rank, found in enumerate(of_two_ranks):
        assert_equal_scales(found["alone"], ranks.calibrated_scales("minmax", ranks.data()[rank :: ranks.SIZE]))


def test_train_ddp_is_the_step_of_one_process(of_two_ranks) -> None:
    model = ranks.trained()
    before = copy.deepcopy(model.state_dict())
    ranks.step(model, ranks.data())
    one, other = (found["trained"] for found in of_two_ranks)
    for name, value in model.state_dict().items():
        assert torch.equal(one[name], other[name]), name
        torch.testing.assert_close(one[name], value, rtol=1e-5, atol=1e-7)
    for name in ("conv.weight", "up.weight", "head.weight"):
        assert not torch.equal(one[name], before[name]), name


def test_train_fully_sharded_is_the_training_of_one_process(of_two_ranks) -> None:
    for found in of_two_ranks:
        assert len(found["sharded"]) == 10
        assert all(found["sharded"].values()), found["sharded"]


def test_train_with_sync_batch_norm_takes_the_statistics_of_all_ranks(of_two_ranks) -> None:
    for found in of_two_ranks:
        assert found["sync"]["in training"] < 1e-4
        assert found["sync"]["equal in eval"]


# ---- export


def test_export_passes_the_checker(tmp_path) -> None:
    onnx = pytest.importorskip("onnx")
    prepared = qt.prepare(nets.trained(nets.ConvNet(), *SHAPE).eval(), backend="tensorrt")
    qt.calibrate(prepared, [torch.randn(SHAPE)], progress=False)
    result = qt.export_onnx(prepared, torch.randn(SHAPE), tmp_path / "model.onnx")
    onnx.checker.check_model(str(result.path), full_check=True)
