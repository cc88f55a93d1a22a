"""Rules for reductions, for operators along one dimension, and for Fourier transforms."""

from collections.abc import Iterator
from typing import Any

from torch.fx import Node

from synchromesh.trace.nodes import by_operator, dim_of, dims_of
from synchromesh.values.placement import Placement

from .operator import Emit, Operand, Operator, OpSpec, P, Replace, Rule, TensorAxis, local_entries


def reduction(op: Operator) -> Iterator[OpSpec]:
    """Kept dims pass; a sum or mean over a sharded dim is partial."""
    x, dims = op.inputs[0], _kept_dims(op)
    for s in op.mapped_states(dims):
        to = dims[s.dim]
        if to is not None:
            if op.name not in ("var", "std") or x.populated(s, op.m):  # warnings of nothing
                yield op.spec({0: s}, s.at(to))
        elif op.name == "sum" and op.output.floating:
            yield op.spec({0: s}, P)
        elif op.name == "mean" and x.populated(s, op.m):
            yield op.spec({0: s}, P, replace=mean_of_part(op, x, s))
    if op.name in ("sum", "mean") and op.output.floating and x.floating:
        yield op.spec({0: P}, P, share=1.0)


def _kept_dims(op: Operator) -> list[int | None]:
    """For every dim of the input its place in the output; None: it is reduced."""
    dims = range(len(op.inputs[0].shape))
    given = op.constant("dim")
    gone = set(dims if given is None or given == [] else dims_of(given, len(dims)))
    left = list(dims) if op.constant("keepdim", False) else [d for d in dims if d not in gone]
    return [None if d in gone else left.index(d) for d in dims]


def mean_of_part(op: Operator, x: Operand, state: Placement) -> Replace:
    """A rank's contribution to a mean over `x`: the mean of its part times its share of `x`."""
    segment = x.shape[state.dim] // state.segments

    def emit(to: Emit, given: dict[str, Any]) -> Node:
        mean = to.original(op.node, given)
        if x.even(state, op.m):
            return to.call(_divide, mean, op.m)
        return to.call(_weigh, mean, to.axis, segment, state.unit)

    return emit


def _divide(x: Any, m: int) -> Any:
    return x / m


def _weigh(x: Any, axis: TensorAxis, segment: int, unit: int) -> Any:
    return x * (local_entries(axis, segment, segment, unit) / segment)


def along(op: Operator) -> Iterator[OpSpec]:
    """cumsum, sort, softmax ...: every dim but the one that is worked along."""
    yield from op.along(dim_of(op.constant("dim", -1), len(op.inputs[0].shape)))


def transform(op: Operator) -> Iterator[OpSpec]:
    """Transforms along one dim (`dim`), two or several; shifts, which move entries along `dim`."""
    n = len(op.inputs[0].shape)
    given, sizes = op.constant("dim"), op.constant("s")
    if given is None:  # the last dims, as many as there are sizes
        given = range(n) if sizes is None else range(n - len(sizes), n)
    yield from op.on_entries(op.along(*dims_of(given, n), linear=True))


REDUCTIONS = (
    "sum", "mean", "amax", "amin", "argmax", "argmin", "var", "std", "logsumexp", "prod", "any",
    "all", "norm",
)  # fmt: skip
FOURIER = [
    f"fft_{kind}{dims}"
    for kind in ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    for dims in ("", "2", "n")
]
RULES: dict[str, Rule] = {
    **by_operator({
        along: (
            "cumsum cumprod sort argsort topk softmax log_softmax _softmax _log_softmax "
            "_safe_softmax"
        ),
        transform: "fft_fftshift fft_ifftshift",
    }),
    **dict.fromkeys(REDUCTIONS, reduction),
    **dict.fromkeys(FOURIER, transform),
}  # fmt: skip
