"""Rules for convolutions, their transposes, pooling and upsampling: by channels."""

from collections.abc import Iterator

from synchromesh.values.placement import shard

from .operator import Operator, OpSpec, P

SPATIAL = {
    "conv1d": 1, "conv2d": 2, "conv3d": 3, "conv_transpose1d": 1, "conv_transpose2d": 2,
    "conv_transpose3d": 3,
}  # fmt: skip


def convolution(op: Operator) -> Iterator[OpSpec]:
    """Output channels, input channels (partial), or groups of them."""
    out, w = op.output, op.tensor("weight")
    if len(out.shape) != SPATIAL[op.name] + 2:
        return  # without a batch dimension
    transposed = "transpose" in op.name
    w_in, w_out = (0, 1) if transposed else (1, 0)
    groups = op.constant("groups")
    x = op.tensor("input")
    made = {s.segments for s in out.states if s.dim == 1}
    read = {s.segments for s in x.states if s.dim == 1}
    if groups == 1:
        weights = {(s.dim, s.segments) for s in w.states}
        for n in sorted(made | {n for d, n in weights if d == w_out}):
            yield op.spec({"weight": shard(w_out, n), "bias": shard(0, n)}, shard(1, n))
        for n in sorted(read | {n for d, n in weights if d == w_in}):
            yield op.spec({"input": shard(1, n), "weight": shard(w_in, n), "bias": P}, P)
        return
    for n in sorted(made | read):
        if groups % (n * op.m) == 0:
            states = {"input": shard(1, n), "weight": shard(0, n), "bias": shard(0, n)}
            yield op.spec(states, shard(1, n), constants={"groups": groups // op.m})


POOLS = {
    **{f"{kind}_pool{n}d": n for kind in ("avg", "max", "adaptive_avg", "adaptive_max",
    "lp") for n in (1, 2, 3)},
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
    yield from op.along(*range(front, len(x.shape)))
    if "max" not in op.name and "lp" not in op.name:
        yield op.spec({0: P}, P, share=1.0)


RULES = {**dict.fromkeys(SPATIAL, convolution), **dict.fromkeys(POOLS, pooling)}
