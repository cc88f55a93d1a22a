"""Rules for convolutions, their transposes, pooling, unpooling and upsampling: by channels."""

from collections.abc import Iterator

from .operator import Operator, OpSpec, P, group_states, spread

SPATIAL = {
    "conv1d": 1, "conv2d": 2, "conv3d": 3, "conv_transpose1d": 1, "conv_transpose2d": 2,
    "conv_transpose3d": 3,
}  # fmt: skip


def convolution(op: Operator) -> Iterator[OpSpec]:
    """Output channels, input channels (partial), or groups of them."""
    out, w = op.output, op.tensor("weight")
    if len(out.shape) != SPATIAL[op.name] + 2:
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


POOLS = {
    **{f"{kind}_pool{n}d": n for kind in ("avg", "max", "adaptive_avg", "adaptive_max")
       for n in (1, 2, 3)},
    **{f"max_pool{n}d_with_indices": n for n in (1, 2, 3)},
    **{f"_adaptive_avg_pool{n}d": n for n in (2, 3)},
    "upsample_nearest1d": 1, "upsample_nearest2d": 2, "upsample_nearest3d": 3,
    "upsample_linear1d": 1,
    "upsample_bilinear2d": 2, "upsample_bicubic2d": 2, "upsample_trilinear3d": 3,
    "_upsample_nearest_exact2d": 2,
}  # fmt: skip


def pooling(op: Operator) -> Iterator[OpSpec]:
    """Every dim in front of the spatial ones; averages and interpolation are linear."""
    x = op.inputs[0]
    front = len(x.shape) - POOLS[op.name]
    yield from op.on_entries(op.along(*range(front, len(x.shape))))
    if "max" not in op.name:
        yield op.spec({0: P}, P, share=1.0)


UNPOOLS = {"max_unpool2d": 2, "max_unpool3d": 3}


def unpooling(op: Operator) -> Iterator[OpSpec]:
    """Values and their places in the plane (or space) alike, by the dims in front of it."""
    front = len(op.inputs[0].shape) - UNPOOLS[op.name]
    states = {s for x in (*op.inputs, op.output) for s in x.states if s.dim < front}
    yield from op.on_entries(op.spec({0: s, 1: s}, s) for s in sorted(states))


RULES = {
    **dict.fromkeys(SPATIAL, convolution), **dict.fromkeys(POOLS, pooling),
    **dict.fromkeys(UNPOOLS, unpooling),
}  # fmt: skip
