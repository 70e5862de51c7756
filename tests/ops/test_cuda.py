"""What only a GPU shows: ops that do not wait for it, its streams and graphs, several devices, large tensors."""

import pytest
import torch
from torch import Tensor

from qtoolkit import ops
from tests import reference
from tests.cases import Channels, assert_same, floats, name_of, scales, zero_points
from tests.ops import test_attention as attention
from tests.ops.test_cuda_values import OF_CPU
from tests.ops.test_every import image, run, sample
from tests.ops.test_fuzz import OURS

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

GB = 2**30


# search_range does: it is the end of a calibration, on the CPU.
@pytest.mark.parametrize("op", [op for op in OURS if op not in ("search_range", *OF_CPU)])
def test_nothing_waits_for_the_device(op):
    given = {k: v.cuda() if isinstance(v, Tensor) else v for k, v in sample(op, image()).items()}
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(op, given)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_no_gradient_waits_for_the_device():
    x, s, z = (t.cuda().requires_grad_() for t in (floats(torch.float32)(4, 6, 999), scales(6), zero_points(6)))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ops.fake_quant(x, s, z, axis=1).sum().backward()
        ops.fake_quant(x, s.detach(), z.detach(), axis=1).sum().backward()
        ops.fake_quant_float(x, s.detach(), "e4m3", axis=1).sum().backward()
        ops.fake_tensor_quant(x, s.detach()[0]).sum().backward()
        ops.fake_quant_(x * 1, s.detach(), axis=1).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("op", [op for op in OURS if op not in OF_CPU])
def test_every_op_on_a_device_that_is_not_the_current_one(op):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    given = sample(op, image())
    there = run(op, {k: v.to("cuda:1") if isinstance(v, Tensor) else v for k, v in given.items()})
    assert torch.cuda.current_device() == 0
    for got, want in zip(
        there, run(op, {k: v.cuda() if isinstance(v, Tensor) else v for k, v in given.items()}), strict=True
    ):
        assert got.device == torch.device("cuda:1")
        assert_same(got, want)


def test_side_stream():
    """Work goes to the current stream: it sees what that stream wrote before, however late."""
    x, s = floats(torch.float32)(1000), scales(1)
    late, stream = torch.zeros(1000, device="cuda"), torch.cuda.Stream()
    source, scale = x.cuda(), s.cuda()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(source)
        y, (lo, hi) = ops.fake_quant(late, scale), ops.minmax(late)
    stream.synchronize()
    assert_same(y, ops.fake_quant(x, s))
    assert (lo.item(), hi.item()) == (x.min().item(), x.max().item())


def test_cuda_graph():
    x, s = torch.zeros(4, 6, 50, device="cuda"), scales(6).cuda()
    ops.fake_quant(x, s, axis=1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = ops.fake_quant(x, s, axis=1)
    x.copy_(floats(torch.float32)(4, 6, 50))
    graph.replay()
    assert_same(y, ops.fake_quant(x.cpu(), s.cpu(), axis=1))


def test_scale_on_another_device():
    with pytest.raises(ValueError, match="scale must be on the device of the input, cuda:0, got cpu"):
        ops.fake_quant(torch.ones(3, device="cuda"), torch.ones(1))


@pytest.mark.parametrize("channels", [Channels(), Channels(1)], ids=str)
def test_more_elements_than_an_int_counts(channels):
    shape = (2, 3, 2**29 // 2 * 3 // 2)  # 2.4e9 elements
    if torch.cuda.mem_get_info()[0] < 40 * GB:
        pytest.skip("less than 40 GiB of GPU memory is free")
    x = torch.zeros(shape, dtype=torch.bfloat16, device="cuda").requires_grad_()
    tail = floats(torch.bfloat16)(5000)
    with torch.no_grad():
        x[-1, -1, -5000:] = tail.cuda()
    s = scales(channels.count(x)).cuda()
    y = ops.fake_quant(x, s, qmin=-100, qmax=90, **channels.named)
    assert_same(y[-1, -1, -5000:], ops.fake_quant(tail, s[-1:].cpu(), qmin=-100, qmax=90))
    y.backward(torch.ones((), dtype=torch.bfloat16, device="cuda").expand(shape))
    wanted = reference.inside(tail, s[-1:].cpu(), None, -100, 90).bfloat16()
    assert_same(x.grad[-1, -1, -5000:], wanted)
    assert x.grad[0, 0, :5000].sum() == 5000
    hi = ops.minmax(x.detach(), **channels.named)[1].reshape(-1)
    assert hi[-1] == tail.max().item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=name_of)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("length", [1, 7, 197, 256, 500, 1024, 1025, 3000, 9000])
def test_attention_is_that_of_the_ops_one_by_one(length, masked, dtype):
    """On CUDA too: bit for bit in float32, where torch sums a softmax in the kernel's order and products are exact in any."""
    given = attention.operands(((2, 3), 9, length, 16, 8), torch.float32)
    mask = torch.linspace(-2, 2, 9 * length).mul(8).round().div(8).view(9, length).cuda() if masked else None
    grid = {"start": torch.tensor(2.0**-8).cuda(), "ratio": None, "rate": None, "zero_point": None}
    learned = {**grid, "ratio": attention.leaf(torch.ones((), device="cuda")), "rate": torch.ones((), device="cuda")}
    found = []
    for how in (attention.by_op, attention.one_by_one):
        values = {name: attention.leaf(value.cuda().to(dtype)) for name, value in given.items()}
        y = how(values, learned, mask, dtype)
        found.append((y, attention.gradients(y, values, learned)))
    (ours, gradients), (torchs, wanted) = found
    if dtype == torch.float32 and length <= 1024:
        assert_same(ours, torchs)
    unit = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}[dtype]
    for one, other in ((ours, torchs), *zip(gradients, wanted, strict=True)):
        torch.testing.assert_close(one, other, rtol=unit, atol=unit * float(other.abs().max()))
