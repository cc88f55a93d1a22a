"""Rules for elementwise operators with broadcasting, and for those of them that are linear."""

from collections.abc import Iterator

from synchromesh.values.placement import Placement

from .operator import Operand, Operator, OpSpec, P, r

# elementwise operators without torch's tag for it
NAMES = {
    "where", "hardswish", "prelu", "log_sigmoid", "divide", "multiply", "__and__", "__or__",
    "__xor__", "clone", "contiguous", "alias", "to", "_to_copy", "detach", "zeros_like",
    "ones_like", "full_like", "logical_not", "dropout", "alias_copy", "lift_fresh_copy",
    "positive", "empty_like", "true_divide", "subtract", "negative", "square", "glu_jvp", "lift",
    "real", "imag", "conj", "_conj", "resolve_conj", "resolve_neg", "complex", "polar",
}  # fmt: skip
# f(x + y) = f(x) + f(y): partial values stay partial
LINEAR = {
    "clone", "contiguous", "alias", "to", "_to_copy", "neg", "negative", "positive", "alias_copy",
    "real", "imag", "conj", "_conj", "conj_physical", "_conj_physical", "resolve_conj",
    "resolve_neg",
}  # fmt: skip
SUMS = {"add", "sub", "subtract", "complex"}  # linear in both operands together
PRODUCTS = {"mul", "multiply", "div", "divide", "true_divide"}
BROADCASTING = {"prelu"}  # whose weight does not broadcast from the right
FILLING = {"zeros_like", "ones_like", "full_like", "empty_like"}


def elementwise(op: Operator) -> Iterator[OpSpec]:
    """Sharded outputs from sharded inputs; broadcast ones in `r`."""
    if op.name in BROADCASTING or len(op.outputs) != 1:
        return
    for state in broadcast_states(op):
        yield op.spec({i: dim_state(x, op.output, state) for i, x in enumerate(op.inputs)}, state)
    if op.output.floating and all(x.floating for x in op.inputs):
        yield from partial(op)


def partial(op: Operator) -> Iterator[OpSpec]:
    """Partial outputs of operators that are linear in one or all of their inputs."""
    if op.name in LINEAR and len(op.inputs) == 1:
        yield op.spec({0: P}, P, share=1.0)
    elif op.name in SUMS and len(op.inputs) == 2:
        yield op.spec({0: P, 1: P}, P, share=1.0)
    elif op.name in PRODUCTS and op.constant("rounding_mode") is None:
        # the other factor's gradient contains the partial one
        yield op.spec({0: P}, P, share=1.0)
        if len(op.inputs) == 2 and op.name in ("mul", "multiply"):
            yield op.spec({1: P}, P, share=1.0)


def broadcast_states(op: Operator) -> list[Placement]:
    """Sharded states to try for the output: its own and those of its inputs."""
    states = set(op.output.states)
    for x in op.inputs:
        offset = len(op.output.shape) - len(x.shape)
        for state in x.states:
            if x.shape[state.dim] == op.output.shape[state.dim + offset]:
                states.add(state.at(state.dim + offset))
    return sorted(states)


def dim_state(x: Operand, out: Operand, state: Placement) -> Placement:
    """State of input `x` when the output, which it broadcasts to, is in `state`."""
    dim = state.dim - (len(out.shape) - len(x.shape))
    if dim < 0 or x.shape[dim] != out.shape[state.dim]:
        return r  # one entry for all shards
    return state.at(dim)
