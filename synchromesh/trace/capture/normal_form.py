"""The normal form of operators: sizes and types are written down, what changes nothing is out.

A rank's block may have one row, and its part of a dim one entry, where the tensor has more."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Node

from synchromesh.trace import meta
from synchromesh.trace.nodes import DROPOUTS, all_arguments, dim_of, same_shape, schema

from .export import Untraceable
from .flat_graph import Sizes

aten = torch.ops.aten

ASSERTS = {
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size", "_functional_assert_scalar", "_functional_assert_async",
}  # fmt: skip
LIFTS = {"lift_fresh_copy", "lift_fresh", "lift"}
RESIZES = {"view", "reshape", "_unsafe_view", "expand"}  # (input, sizes): -1 becomes the size
SHAPED_AS = {
    "view_as": aten.view.default, "reshape_as": aten.reshape.default,
    "expand_as": aten.expand.default, "broadcast_to": aten.expand.default,
}  # (input, the wanted shape or a tensor that has it)  # fmt: skip
SPARSE = {"embedding": 4, "embedding_bag": 5}  # the place of `sparse` among the arguments
OUT_OF_PLACE = {
    **{f"__i{n}__": f"__{n}__" for n in ("and", "or", "xor", "lshift", "rshift")},
    "normal_": "normal_functional",
}  # where the name is more than the one in place without its underscore

Call = tuple[OpOverload, Any, Any]  # operator, arguments, keyword arguments


def settled(target: OpOverload, args: Any, kwargs: Any, val: Tensor, sizes: Sizes) -> Call:
    """The operator with what it found out from its operands' sizes and types written down."""
    name = target._schema.name.split("::")[1]
    if name in SHAPED_AS:
        return SHAPED_AS[name], (args[0], [sizes(s) for s in val.shape]), {}
    if name in RESIZES and target._overloadname != "dtype":
        args = (args[0], [sizes(s) for s in val.shape], *args[2:])
        return target, args, without(kwargs, "size", "shape")
    if name == "squeeze":
        return aten.squeeze.dims, (args[0], squeezed_dims(target, args, kwargs)), {}
    if name == "type_as":
        return aten.to.dtype, (args[0], val.dtype), {}
    if name in SPARSE:  # a gradient of few rows adds up as one of all rows (`meta.sparse`)
        place = SPARSE[name]
        args = (*args[:place], False, *args[place + 1 :]) if len(args) > place else args
        return target, args, without(kwargs, "sparse")
    return target, args, kwargs


def asks_sparse(target: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of an embedding asks for a gradient of few rows."""
    place = SPARSE.get(target._schema.name.split("::")[1])
    if place is None:
        return False
    return bool(args[place] if len(args) > place else kwargs.get("sparse"))


def without(kwargs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in names}


def squeezed_dims(target: OpOverload, args: Any, kwargs: Mapping[str, Any]) -> list[int]:
    """The dims that a squeeze took away when it was traced: of size 1 whatever the rows."""
    shape = meta.val(args[0]).shape
    names = (a.name for a in target._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dims = given.get("dim", range(len(shape)))
    dims = {dim_of(d, len(shape)) for d in ([dims] if isinstance(dims, int) else dims) if shape}
    return [d for d in sorted(dims) if isinstance(shape[d], int) and shape[d] == 1]


def changes_nothing(node: Node, name: str, source: Node) -> bool:
    """Whether it repeats its first argument: a cast to its type, a full slice, no dropout."""
    val, given = meta.val(node), meta.val(source)
    if name == "alias":
        return True
    if name in DROPOUTS:
        args = all_arguments(node)
        return args["p"] == 0 or not args["train"]
    if name == "to":
        same_type = (val.dtype, val.device) == (given.dtype, given.device)
        return same_type and not all_arguments(node).get("copy")
    if name == "slice" and all_arguments(node)["step"] != 1:
        return False
    return name in ("slice", "expand") and same_shape(val, given)


def out_of_place(node: Node, name: str, line: str) -> OpOverload:
    """The operator that makes what an in-place one writes; else Untraceable, at `line`."""
    base = OUT_OF_PLACE.get(name, name.removesuffix("_"))
    assert isinstance(node.target, OpOverload)
    overload = node.target._overloadname
    overload = "p" if (base, overload) == ("bernoulli", "float") else overload
    target: OpOverload | None = getattr(getattr(aten, base, None), overload, None)
    if target is None or name == base:
        raise Untraceable(
            f"{line} changes a tensor in place ({name}): use an operator that returns a new tensor"
        )
    return target


def other_defaults(
    node: Node, target: OpOverload, args: Any, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Defaults of an in-place operator that `target` does not have (`bernoulli_(p=0.5)`)."""
    known = {a.name: a for a in target._schema.arguments}
    defaults = {}
    for a in schema(node).arguments[len(args) :]:
        if a.name in known and a.name not in kwargs and a.has_default_value():
            other = known[a.name]
            if not other.has_default_value() or other.default_value != a.default_value:
                defaults[a.name] = a.default_value
    return defaults
