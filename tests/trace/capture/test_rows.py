"""Rows that are taken for regular are so: a block of rows gives the block of what all give."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace import meta
from synchromesh.trace.capture import rows as rows_of_trace
from synchromesh.trace.capture.export import export
from synchromesh.trace.capture.flatten import flatten
from synchromesh.trace.capture.row_layout import Case, RowLayout
from synchromesh.trace.capture.rows import annotate
from synchromesh.trace.meta import why_irregular
from synchromesh.trace.partition.subgraph import operand_of
from synchromesh.trace.rules.operator import ROWS as ROWS_OF_RULES
from synchromesh.values.component import Rows, Value
from synchromesh.values.placement import shard
from tests.trace.capture.programs import Programs

ROWS = 7
BLOCKS = ((0, 1), (6, 7), (2, 5), (0, 6))
CHAINS = 50  # `python -m benchmarks.row_law` tries more
EXPORTED = 50  # chains per export, which costs more than they do


def annotated(model: nn.Module, batch: Tensor) -> tuple[torch.fx.Graph, dict[str, Tensor]]:
    exported = export(model, lambda m, b: m(b), batch, None)
    graph, constants, symbols = flatten(exported, model)
    annotate(graph, symbols)
    return graph, constants


def values(
    graph: torch.fx.Graph, constants: dict[str, Tensor], model: nn.Module, x: Tensor
) -> dict[torch.fx.Node, Any]:
    """What every node of the graph computes of a batch."""
    held: dict[tuple[str, str], Any] = {("rows", "rows"): x.shape[0], ("leaf", "batch"): x}
    held |= {("constant", n): t for n, t in constants.items()}
    held |= {("parameter", n): p for n, p in model.named_parameters()}
    found: dict[torch.fx.Node, Any] = {}
    with torch.no_grad():
        for node in graph.nodes:
            if node.op == "placeholder":
                found[node] = held[meta.role(node), meta.name(node)]
            elif node.op == "call_function":
                args, kwargs = torch.fx.node.map_arg((node.args, node.kwargs), found.__getitem__)  # type: ignore[arg-type]
                found[node] = node.target(*args, **kwargs)
    return found


def regular(graph: torch.fx.Graph) -> list[torch.fx.Node]:
    """The nodes whose rows may be taken apart."""
    return [
        n
        for n in graph.nodes
        if isinstance(v := meta.value(n), Value) and v.rows and why_irregular(n) is None
    ]


def violations(model: nn.Module, x: Tensor) -> tuple[list[str], int]:
    """Regular nodes whose values of a block are not the block of the values, and how many are
    regular."""
    graph, constants = annotated(model, x)
    whole = values(graph, constants, model, x)
    claimed, found = regular(graph), {}
    for start, stop in BLOCKS:
        blocks = values(graph, constants, model, x[start:stop])
        for node in claimed:
            rows = meta.value(node).rows
            apart = whole[node].unflatten(rows.dim, (rows.segments, ROWS, rows.inner))
            wanted = apart.narrow(rows.dim + 1, start, stop - start)
            wanted = wanted.flatten(rows.dim, rows.dim + 2)
            same = wanted.shape == blocks[node].shape and torch.allclose(
                wanted.double(), blocks[node].double(), rtol=1e-12, atol=1e-12, equal_nan=True
            )
            if not same:
                found[node] = f"{node.target} {rows} of {node.all_input_nodes}"
    return list(found.values()), len(claimed)


def batch() -> Tensor:
    g = torch.Generator().manual_seed(5)
    return torch.randn(ROWS, 2, 6, generator=g, dtype=torch.float64)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, CHAINS, EXPORTED))
def test_what_a_block_of_rows_gives_is_the_block_of_what_all_give(first: int) -> None:
    found, claimed = violations(Programs(first, EXPORTED), batch())
    assert found == []
    assert claimed > 4 * EXPORTED  # and most are taken for regular


def test_the_law_finds_a_guess(monkeypatch: pytest.MonkeyPatch) -> None:
    def guess(case: Case) -> RowLayout:
        return case.result.with_segments({1})

    monkeypatch.setattr(rows_of_trace, "prove", guess)
    found, _ = violations(Programs(0, 15), batch())
    assert len(found) > 5


class One(nn.Module):
    """A linear and one thing more."""

    def __init__(self, body: Any) -> None:
        super().__init__()
        self.body, self.linear = body, nn.Linear(6, 6).double()

    def forward(self, x: Tensor) -> Tensor:
        self.made = self.body(self.linear(x), x)
        return self.made.square().mean()  # type: ignore[no-any-return]


def last(body: Any) -> tuple[torch.fx.Node, int]:
    """What `body` makes of (rows, 2, 6), as the node that the loss squares; and violations."""
    model = One(body)
    graph, _ = annotated(model, batch())
    (square,) = (n for n in graph.nodes if "square" in n.name)
    return square.all_input_nodes[0], len(violations(model, batch())[0])


def places(h: Tensor) -> Tensor:
    """The place of every row."""
    return torch.arange(h.shape[0])


def none(x: Tensor) -> Tensor:
    """Zero for every row, which nobody knows before."""
    return x.argmax(-1)[:, 0] * 0


REGULAR: dict[str, tuple[Any, Rows]] = {
    "own entries": (lambda h, x: h[places(h), x.sum(-1).argmax(-1)], Rows()),
    "own, spread": (lambda h, x: h[places(h)[:, None], none(x)[:, None]], Rows()),
    "zeros": (
        lambda h, x: torch.cat([h, x.new_zeros(2 * x.shape[0], 2, 6)], 0).sin(),
        Rows(0, 3, 1),
    ),
    "inner": (
        lambda h, x: h.new_ones(2, 6).cumsum(0).repeat(h.shape[0], 1) + h.view(-1, 6),
        Rows(0, 1, 2),
    ),
    "attention": (
        lambda h, x: F.scaled_dot_product_attention(h, x, h, attn_mask=x @ h.mT),
        Rows(),
    ),
    "an operator without a family": (lambda h, x: torch.cdist(h, x), Rows()),
    "by rows sorted": (lambda h, x: torch.searchsorted(x.sort(-1)[0], h) * h, Rows()),
    "bags": (
        lambda h, x: (
            F.embedding_bag((x > 0).long().flatten(1), h.new_ones(2, 3).sin()) + h[:, 0, :3]
        ),
        Rows(),
    ),
    "put": (lambda h, x: h.index_put((places(h), none(x)), x[:, 0]), Rows()),
    "mask": (lambda h, x: h.masked_fill(x > 0, 0.1), Rows()),
    "unpooling": (
        lambda h, x: F.max_unpool2d(*F.max_pool2d(h[:, None], 2, return_indices=True), (2, 2)),
        Rows(),
    ),
}
IRREGULAR: dict[str, tuple[Any, str]] = {
    "place": (lambda h, x: h + places(h)[:, None, None], "position of its rows (arange"),
    "number": (lambda h, x: h / x.shape[0], "the number of rows (div"),
    "causal": (lambda h, x: h[:, 0].tril(), "position of its rows (tril"),
    "fft": (lambda h, x: torch.fft.fft(h, dim=0).abs(), "fft_fft along dimension 0"),
    "over rows": (
        lambda h, x: F.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3),
        "scaled_dot_product_attention along dimension 1",
    ),
    "convolution": (
        lambda h, x: F.conv1d(h.flatten(1).t()[None], h.new_ones(12, 12, 1)),
        "conv1d along dimension 2",
    ),
    "others' entries": (lambda h, x: h[none(x)], "index along dimension 0"),
    "among all": (
        lambda h, x: torch.searchsorted(x[:, 0, 0].sort()[0], h[:, 0, 0]) * h[:, 0, 0],
        "searchsorted",
    ),
    "other orders": (
        lambda h, x: torch.cat([h, h], 0) + x.repeat_interleave(2, 0),
        "in different orders (add",
    ),
    "wrong view": (
        lambda h, x: torch.cat([h, x], 0).unflatten(0, (-1, 2)),
        "not known (unflatten",
    ),
    "renorm": (lambda h, x: h.renorm(2, 1, 1.0), "not known (renorm"),
}


@pytest.mark.parametrize("name", REGULAR)
def test_rows_that_are_proved(name: str) -> None:
    body, rows = REGULAR[name]
    node, wrong = last(body)
    assert why_irregular(node) is None and meta.value(node).rows == rows
    assert wrong == 0


@pytest.mark.parametrize("name", IRREGULAR)
def test_rows_that_are_not_proved_say_why(name: str) -> None:
    body, words = IRREGULAR[name]
    node, wrong = last(body)
    assert words in str(why_irregular(node)) and "test_rows.py:" in str(why_irregular(node))
    assert wrong == 0


def test_rows_in_no_known_order_are_not_sharded_behind() -> None:
    states = (shard(0, ROWS_OF_RULES),)  # behind each row, as heads are
    for body, allowed in (
        (lambda h, x: h.flatten(0, 1), True),
        (lambda h, x: h.flip(0).flatten(0, 1), False),
    ):
        node, _ = last(body)
        assert operand_of((node, 0)).allows(states[0], 2) == allowed
