"""Networks of others, in small: their constructs go through graph mode as they are, up to a verified file."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

# ---- images and texts in one space, as CLIP


class MaskedBlock(nn.Module):
    """A transformer's block whose mask is a tensor that is no buffer, shared by all blocks, and cast in each forward."""

    def __init__(self, width: int, mask: Tensor | None) -> None:
        super().__init__()
        self.attention, self.norms = (
            nn.MultiheadAttention(width, 2),
            nn.ModuleList(nn.LayerNorm(width) for _ in range(2)),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.mask = mask

    def attend(self, x: Tensor) -> Tensor:
        self.mask = self.mask.to(dtype=x.dtype, device=x.device) if self.mask is not None else None
        return self.attention(x, x, x, need_weights=False, attn_mask=self.mask)[0]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class ImageTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.token = nn.Conv2d(3, 16, 4, 4, bias=False), nn.Parameter(torch.randn(16))
        self.places, self.norm = nn.Parameter(torch.randn(17, 16) / 4), nn.LayerNorm(16)
        self.blocks, self.project = (
            nn.Sequential(*(MaskedBlock(16, None) for _ in range(2))),
            nn.Parameter(torch.rand(16, 8)),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        x = x.reshape(x.shape[0], x.shape[1], -1).permute(0, 2, 1)
        token = self.token.to(x.dtype) + torch.zeros(x.shape[0], 1, x.shape[-1], dtype=x.dtype, device=x.device)
        x = torch.cat([token, x], 1) + self.places.to(x.dtype)
        x = self.blocks(x.permute(1, 0, 2)).permute(1, 0, 2)
        return self.norm(x[:, 0, :]) @ self.project


class TextTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        mask = torch.full((6, 6), -math.inf).triu_(1)
        self.embed, self.places, self.norm = (
            nn.Embedding(20, 16),
            nn.Parameter(torch.randn(6, 16) / 4),
            nn.LayerNorm(16),
        )
        self.blocks, self.project = (
            nn.Sequential(*(MaskedBlock(16, mask) for _ in range(2))),
            nn.Parameter(torch.rand(16, 8)),
        )

    def forward(self, text: Tensor) -> Tensor:
        x = self.embed(text) + self.places
        x = self.norm(self.blocks(x.permute(1, 0, 2)).permute(1, 0, 2))
        return x[torch.arange(x.shape[0]), text.argmax(dim=-1)] @ self.project


# ---- video matting with a recurrent decoder


class Normalize(nn.Module):
    """Looks at the values of its constants, as torchvision's normalize does: a leaf module."""

    def forward(self, x: Tensor) -> Tensor:
        deviation = torch.as_tensor([0.2, 0.3, 0.2], dtype=x.dtype, device=x.device)
        if (deviation == 0).any():
            raise ValueError("zero")
        return x / deviation[:, None, None]


class Recurrent(nn.Module):
    """A gated unit whose state is an argument, for images or for sequences of them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gates = nn.Sequential(nn.Conv2d(2 * width, 2 * width, 3, padding=1), nn.Sigmoid())
        self.new = nn.Sequential(nn.Conv2d(2 * width, width, 3, padding=1), nn.Tanh())

    def forward(self, x: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if state is None:
            state = torch.zeros((x.size(0), x.size(-3), x.size(-2), x.size(-1)), device=x.device, dtype=x.dtype)
        if x.ndim == 5:
            raise NotImplementedError
        reset, update = self.gates(torch.cat([x, state], dim=1)).split(x.size(1), dim=1)
        state = (1 - update) * state + update * self.new(torch.cat([x, reset * state], dim=1))
        return state, state


class Decoder(nn.Module):
    def __init__(self, width: int, skip: int) -> None:
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(width + skip, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.unit = Recurrent(width // 2)

    def forward(self, x: Tensor, skip: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor]:
        if x.ndim == 5 and skip.ndim == 5:
            raise NotImplementedError
        x = F.interpolate(x, size=skip.shape[2:], mode="bilinear", align_corners=False)
        x = self.conv(torch.cat([x, skip], dim=1))
        a, b = x.split(x.size(-3) // 2, dim=-3)
        b, state = self.unit(b, state)
        return torch.cat([a, b], dim=-3), state


class Matting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normalize, self.stem = Normalize(), nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(8, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 1), nn.ReLU())
        self.decode, self.head = Decoder(8, 8), nn.Conv2d(8, 4, 1)

    def forward(
        self,
        x: Tensor,
        state: Tensor | None = None,
        ratios: list[float] = [1.0, 0.5],  # noqa: B006
    ) -> tuple[Tensor, Tensor]:
        small = F.interpolate(x, scale_factor=ratios[1], mode="bilinear") if ratios[0] != 1 else x
        skip = self.stem(self.normalize(small))
        y, state = self.decode(self.body[2:](self.body[:2](skip)), skip, state)
        return self.head(y).sigmoid(), state


# ---- forecasts: normalization that keeps its statistics, series of patches, of scales, of even and odd steps


class Reversible(nn.Module):
    """Writes the statistics of a series, and reads them at the end of the same forward."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(features)), nn.Parameter(torch.zeros(features))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            dims = tuple(range(1, x.ndim - 1))
            self.mean = torch.mean(x, dim=dims, keepdim=True).detach()
            self.deviation = torch.sqrt(torch.var(x, dim=dims, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.deviation * self.weight + self.bias
        return (x - self.bias) / self.weight * self.deviation + self.mean


class Patches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.embed = Reversible(3), nn.Linear(4, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(40, 6)
        self.places = nn.Parameter(torch.randn(5, 8) / 4)
        self.attended: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        z = self.norm(x, "norm").permute(0, 2, 1)
        z = self.embed(z.unfold(-1, 4, 2)) + self.places
        z = self.encoder(torch.reshape(z, (z.shape[0] * z.shape[1], z.shape[2], z.shape[3])))
        self.attended = z.mean(-1)
        z = self.head(torch.reshape(z, (-1, x.shape[-1], z.shape[-2] * z.shape[-1])))
        return self.norm(z.permute(0, 2, 1), "denorm")


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(Reversible(3) for _ in range(2))
        self.mixes = nn.ModuleList(
            nn.Sequential(nn.Linear(12 // 2**i, 8), nn.GELU(), nn.Linear(8, 6)) for i in range(2)
        )
        self.pool = nn.AvgPool1d(2)

    def forward(self, x: Tensor) -> Tensor:
        series, outputs = [], []
        for i, norm in enumerate(self.norms):
            series.append(norm(x if i == 0 else self.pool(series[-1].permute(0, 2, 1)).permute(0, 2, 1), "norm"))
        for mix, norm, each in zip(self.mixes, self.norms, series, strict=True):
            outputs.append(norm(mix(each.permute(0, 2, 1)).permute(0, 2, 1), "denorm"))
        return torch.stack(outputs, dim=-1).sum(-1)


class Interleaved(nn.Module):
    """A tree of levels that divide a series in even and odd steps, and zip what returns."""

    def __init__(self, levels: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            nn.Sequential(nn.Conv1d(3, 3, 3, padding=1), nn.LeakyReLU(), nn.Tanh()) for _ in range(4)
        )
        self.below = nn.ModuleList(Interleaved(levels - 1) for _ in range(2)) if levels else None

    def zip_up(self, even: Tensor, odd: Tensor) -> Tensor:
        even, odd = even.permute(2, 0, 1), odd.permute(2, 0, 1)
        steps: list[Tensor] = []
        for i in range(odd.shape[0]):
            steps += [even[i].unsqueeze(0), odd[i].unsqueeze(0)]
        return torch.cat(steps, 0).permute(1, 2, 0)

    def forward(self, x: Tensor) -> Tensor:
        even, odd = x[..., ::2], x[..., 1::2]
        d, c = odd.mul(torch.exp(self.parts[0](even))), even.mul(torch.exp(self.parts[1](odd)))
        even, odd = c + self.parts[2](d), d - self.parts[3](c)
        if self.below is not None:
            even, odd = self.below[0](even), self.below[1](odd)
        return self.zip_up(even, odd)


class Series(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tree, self.head = Interleaved(2), nn.Conv1d(16, 6, 1, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head((self.tree(x.permute(0, 2, 1)) + x.permute(0, 2, 1)).permute(0, 2, 1))


# By the name of a network: it, example inputs of one sample and of more, its leaf modules, and the layers with weights.
NETS: dict[str, tuple[type[nn.Module], Any, tuple[type[nn.Module], ...], int]] = {
    "image tower": (ImageTower, torch.rand(4, 3, 16, 16), (), 8),
    "text tower": (TextTower, torch.randint(0, 20, (4, 6)), (), 8),
    "video matting": (Matting, torch.rand(4, 3, 16, 16), (Normalize,), 7),
    "patches": (Patches, torch.rand(4, 12, 3), (), 5),
    "scales": (Scales, torch.rand(4, 12, 3), (), 4),
    "interleaved": (Series, torch.rand(4, 16, 3), (), 29),
}


@pytest.mark.slow
@pytest.mark.parametrize("ran", [False, True])
@pytest.mark.parametrize("name", NETS)
def test_a_network_goes_from_float_to_a_verified_file(tmp_path, name: str, ran: bool) -> None:
    torch.manual_seed(0)
    kind, x, leaves, count = NETS[name]
    model = kind().train()
    if ran:
        model(x)
    prepared = qt.prepare(model, x[:2], "onnxruntime", leaf_modules=leaves)
    with qt.disable_quantization(prepared.eval()):
        for ours, theirs in zip(_outputs(prepared(x)), _outputs(model.eval()(x)), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    weights = [line.name for line in qt.quantization_report(prepared).quantized if line.weight]
    assert len(weights) == count, weights
    qt.calibrate(prepared, [x], progress=False)
    optimizer = torch.optim.SGD(prepared.train().parameters(), lr=1e-3)
    for _ in range(3):
        optimizer.zero_grad()
        sum(y.square().mean() for y in _outputs(prepared(x))).backward()
        optimizer.step()
    exporter = "torchscript" if leaves else "dynamo"  # torch.export does not follow the Python of the leaf module
    exported = qt.export_onnx(qt.convert(prepared), x, tmp_path / "model.onnx", exporter=exporter, progress=False)
    assert exported.verification.layer_codes.differing == 0


def _outputs(value: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return value if isinstance(value, tuple) else (value,)
