"""Rules for convolutions, their transposes, pooling, unpooling and upsampling: by channels."""

from collections.abc import Iterator

from synchromesh.trace.nodes import by_operator

from .operator import Operator, OpSpec, P, Rule, group_states, spread


def first_spatial(op: Operator) -> int:
    """The first of the spatial dims, of which there are as many as the name says: max_pool2d."""
    return len(op.output.shape) - int(next(filter(str.isdigit, op.name)))


def convolution(op: Operator) -> Iterator[OpSpec]:
    """Output channels, input channels (partial), or groups of them."""
    out, w = op.output, op.tensor("weight")
    if first_spatial(op) != 2:
        return  # without a batch dimension
    if op.constant("groups") > 1:
        yield from _by_groups(op, op.constant("groups"))
        return
    x, (w_in, w_out) = op.tensor("input"), (0, 1) if "transpose" in op.name else (1, 0)
    for s in sorted(out.cuts(1) | w.cuts(w_out)):
        if out.populated(s.at(1), op.m):
            yield op.spec({"weight": s.at(w_out), "bias": s}, s.at(1))
    for s in sorted(x.cuts(1) | w.cuts(w_in)):
        if x.populated(s.at(1), op.m):
            yield op.spec({"input": s.at(1), "weight": s.at(w_in), "bias": P}, P)


def _by_groups(op: Operator, groups: int) -> Iterator[OpSpec]:
    """Every rank has whole groups of channels."""
    x, w, out = op.tensor("input"), op.tensor("weight"), op.output
    lengths = {"input": x.shape[1], "weight": w.shape[0], "bias": out.shape[1]}
    known = ((x.shape[1], x.cuts(1)), (w.shape[0], w.cuts(0)), (out.shape[1], out.cuts(1)))
    for s in group_states(groups, op.m, known):
        if s.units(groups) >= op.m:
            states = {name: spread(s, groups, n, 0, op.m) for name, n in lengths.items()}
            made = states["bias"].at(1)
            states["input"] = states["input"].at(1)
            yield op.spec(states, made, replace=op.with_local("groups", groups, s))


def pooling(op: Operator) -> Iterator[OpSpec]:
    """Every dim in front of the spatial ones; averages and interpolation are linear."""
    yield from op.on_entries(op.along(*range(first_spatial(op), len(op.output.shape))))
    if "max" not in op.name:
        yield op.spec({0: P}, P, share=1.0)


def unpooling(op: Operator) -> Iterator[OpSpec]:
    """Values and their places in the plane (or space) alike, by the dims in front of it."""
    tensors, spatial = (*op.inputs, op.output), first_spatial(op)
    states = {s for x in tensors for s in x.states if s.dim < spatial}
    yield from op.on_entries(op.spec({0: s, 1: s}, s) for s in sorted(states))


RULES: dict[str, Rule] = by_operator({
    convolution: "conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d",
    pooling: (
        "avg_pool1d avg_pool2d avg_pool3d max_pool1d max_pool2d max_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d adaptive_max_pool2d "
        "adaptive_max_pool3d max_pool1d_with_indices max_pool2d_with_indices "
        "max_pool3d_with_indices _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d upsample_linear1d upsample_bilinear2d "
        "upsample_bicubic2d upsample_trilinear3d _upsample_nearest_exact2d"
    ),
    unpooling: "max_unpool2d max_unpool3d",
})  # fmt: skip
