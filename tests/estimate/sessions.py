"""Planning sessions of small stacks of layers on clusters that are not there."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.estimate.datasheet import DatasheetFacts
from synchromesh.planning.session import PlanningSession
from synchromesh.trace.capture.capture import trace
from synchromesh.values.cluster import Cluster

ROWS = 32


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    return F.mse_loss(model(batch), batch)


def session_of(layers: Sequence[nn.Module], width: int, cluster: Cluster) -> PlanningSession:
    """Of AdamW on `layers`, which read and give `width` numbers of each of `ROWS`."""
    model = nn.Sequential(*layers)
    step = trace(model, loss, torch.zeros(ROWS, width), training=True)
    optimizer = torch.optim.AdamW(model.parameters())
    return PlanningSession(DatasheetFacts.of(step, model, optimizer, ROWS, cluster))


def stack(width: int, count: int = 4) -> list[nn.Module]:
    """So many linear layers, each before a ReLU."""
    torch.manual_seed(0)
    make = partial(nn.Linear, width, width)
    return [m for _ in range(count) for m in (make(), nn.ReLU())]
