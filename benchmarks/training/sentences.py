"""A text encoder of Hugging Face on STS-B: its weights, the sentences, the scores of pairs, and its distillation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import qtoolkit as qt

Batch = tuple[Tensor, Tensor]


class Pool(nn.Module):
    """The mean of the last hidden states over the tokens of a sentence, with length 1."""

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Return (sentences, width) of (sentences, tokens, width)."""
        kept = mask[..., None].to(hidden.dtype)
        return F.normalize((hidden * kept).sum(1) / kept.sum(1), dim=1)


class SentenceEncoder(nn.Module):
    """An encoder of tokens with the pool behind it."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder, self.pool = encoder, Pool()

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return an embedding for each sentence."""
        return self.pool(self.encoder(input_ids=ids, attention_mask=mask)[0], mask)


def load_encoder(folder: Path) -> SentenceEncoder:
    """Return the BERT of a folder with config.json and model.safetensors, in eval mode."""
    from safetensors.torch import load_file
    from transformers import BertConfig, BertModel

    encoder = BertModel(BertConfig.from_json_file(folder / "config.json"), add_pooling_layer=False)
    missing = encoder.load_state_dict(load_file(folder / "model.safetensors"), strict=False).missing_keys
    if missing:
        raise SystemExit(f"{folder / 'model.safetensors'} lacks weights of the encoder: {', '.join(missing)}.")
    return SentenceEncoder(encoder).eval()


@dataclass(frozen=True)
class Sentences:
    """Pairs of sentences as tokens (2, pairs, tokens), their lengths (2, pairs), and the scores of the pairs.

    The first `seen` pairs, without their scores, are what ranges are calibrated and students are trained on.
    """

    ids: Tensor
    length: Tensor
    score: np.ndarray
    seen: int

    def batches(self, pairs: slice, size: int) -> Iterator[tuple[Tensor, Batch]]:
        """Yield batches of sentences of about the same length: their places in (2 * pairs,), ids and mask."""
        ids, length = self.ids[:, pairs].flatten(0, 1), self.length[:, pairs].flatten()
        for places in length.argsort().split(size):
            tokens = int(length[places].max())
            yield places, (ids[places, :tokens], (torch.arange(tokens) < length[places, None]).long())

    def training(self, size: int, count: int) -> list[Batch]:
        """Return the first batches of the sentences that may be seen, in a random order."""
        batches = [batch for _, batch in self.batches(slice(self.seen), size)]
        order = torch.randperm(len(batches), generator=torch.Generator().manual_seed(0))
        return [batches[place] for place in order[:count].tolist()]


def load_sentences(folder: Path, pairs: int, seen: int) -> Sentences:
    """Return the first pairs of STS-B's dev split."""
    with np.load(folder / "stsb_dev_tok.npz") as archive:
        ids, length = (torch.from_numpy(archive[name].astype(np.int64))[:, :pairs] for name in ("ids", "length"))
        return Sentences(ids, length, archive["score"][:pairs], seen)


def padded(batch: Batch, tokens: int) -> Batch:
    """Return a batch with at least so many tokens a sentence: ids and mask are 0 behind its own."""
    ids, mask = batch
    missing = max(tokens - ids.size(1), 0)
    return F.pad(ids, (0, missing)), F.pad(mask, (0, missing))


@dataclass(frozen=True)
class Correlation:
    """Correlations of the cosines of pairs with their scores, times 100: of all pairs, and of those not seen before."""

    spearman: float
    pearson: float
    unseen: float


@torch.no_grad()
def embeddings_of(model: nn.Module, sentences: Sentences) -> Tensor:
    """Return a model's embeddings of all sentences, (2 * pairs, width)."""
    parts = [(places, model(*batch)) for places, batch in sentences.batches(slice(None), 100)]
    places = torch.cat([places for places, _ in parts])
    return torch.cat([embedding for _, embedding in parts])[places.argsort()]


def correlation(embeddings: Tensor, sentences: Sentences) -> Correlation:
    """Return how well the cosines of embeddings follow the scores."""
    from scipy.stats import pearsonr, spearmanr

    one, two = embeddings.chunk(2)
    cosine, score, seen = (one * two).sum(1).numpy(), sentences.score, sentences.seen
    found = spearmanr(cosine, score)[0], pearsonr(cosine, score)[0], spearmanr(cosine[seen:], score[seen:])[0]
    return Correlation(*(100 * float(value) for value in found))


def distill(
    model: nn.Module, teacher: nn.Module, batches: Sequence[Batch], rate: float, progress: Callable[[int], object]
) -> nn.Module:
    """Train a quantized model towards the float model's embeddings, a step for each batch; return it in eval mode."""
    model.eval()  # without dropout, which the float model does not have either
    optimizer = torch.optim.Adam(qt.parameter_groups(model, lr=rate, weight_decay=0.0, scale_lr=rate))
    falling = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / len(batches))
    for module in model.modules():
        module.training = not isinstance(module, nn.Dropout)
    with qt.tuning.Distillation(model, teacher, features=["pool"], logits_weight=0.0) as distillation:
        for batch in batches:
            optimizer.zero_grad()
            distillation(batch, model(*batch)).backward()
            optimizer.step()
            falling.step()
            progress(1)
    return model.eval()
