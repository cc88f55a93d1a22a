"""Scores of models that predict a token at every place: logits (rows, length, tokens) against
targets (rows, length), of which those that are `IGNORED`, as padding, count nowhere."""

from torch import Tensor
from torch.nn import functional as F

IGNORED = -100


def loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Cross-entropy summed over the targets that count, and their number: whose quotient is the
    mean over all of them however rows are divided."""
    total = F.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum"
    )
    return total, (targets != IGNORED).sum()


def metric(logits: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """Sums over the rows of the row's means over its targets that count: `accuracy`, the share
    that got the best score, and `nll`, the negative log likelihood in nats. exp(nll) is the
    perplexity, where all rows have equally many targets."""
    counted = targets != IGNORED
    number = counted.sum(1)
    right = (logits.argmax(-1) == targets).sum(1)
    each = F.cross_entropy(logits.transpose(1, 2), targets, ignore_index=IGNORED, reduction="none")
    return {
        "accuracy": (right / number).sum(),
        "nll": (each.sum(1) / number).sum(),
    }
