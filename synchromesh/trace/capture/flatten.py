"""Flattening: the exported program as one graph without regions, asserts, in-place operators."""

import operator
from collections.abc import Mapping
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx.node import map_arg

from .casts import CASTABLE, Autocast, casts
from .export import Export, Untraceable
from .nodes import (
    Owners,
    has_gradients,
    line_of,
    owner,
    same_shape,
    schema,
    short_name,
    viewed,
    writes,
    written,
)
from .sizes import Sizes

Node = torch.fx.Node
aten = torch.ops.aten

DROPPED = {
    "_assert_tensor_metadata", "_assert_scalar", "_assert_async", "sym_constrain_range",
    "sym_constrain_range_for_size", "_functional_assert_scalar", "_functional_assert_async",
}  # fmt: skip
LIFTS = {"lift_fresh_copy", "lift_fresh", "lift"}
DROPOUTS = {"dropout", "dropout_", "feature_dropout", "alpha_dropout"}
RESIZES = {
    "view",
    "reshape",
    "_unsafe_view",
    "expand",
}  # (input, sizes): -1 becomes the size itself
SHAPED_AS = {
    "view_as": aten.view.default,
    "reshape_as": aten.reshape.default,
    "expand_as": aten.expand.default,
    "broadcast_to": aten.expand.default,
}  # (input, the wanted shape or a tensor that has it)
DUNDERS = {f"__i{n}__": f"__{n}__" for n in ("and", "or", "xor", "lshift", "rshift")}


class Storage:
    """The cells that may share memory.

    fresh: memory of a tensor that the code makes anew in every call (`torch.tensor(2.0)`).
    """

    def __init__(self) -> None:
        self.cells: list[Cell] = []
        self.fresh = False


class Cell:
    """What an exported node stands for now: an in-place operator puts a new node in its place."""

    def __init__(self, node: Any, storage: Storage | None = None, made: Any = None) -> None:
        self.node = node
        self.storage = storage or Storage()
        self.storage.cells.append(self)
        self.made = made  # (cell, target, args) when it is a select or slice of another cell
        self.readers: list[int] = []  # positions of the exported nodes that read it


Environment = dict[Node, Any]


def shared_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter or buffer -> the name that the model gives it first."""
    first: dict[int, str] = {}
    shared = {}
    for group in (model.named_parameters, model.named_buffers):
        for name, tensor in group(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                shared[name] = first[id(tensor)]
    return shared


def flatten(
    export: Export, model: nn.Module
) -> tuple[torch.fx.Graph, dict[str, Tensor], set[sympy.Symbol]]:
    """The flat graph, its constants, and the symbols that stand for the rows in its shapes."""
    return Flattener(export, model).run()


def unlike_defaults(
    node: Node, target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Defaults of an in-place operator that `target` does not have (`bernoulli_(p=0.5)`)."""
    known = {a.name: a for a in target._schema.arguments}
    found = {}
    for a in schema(node).arguments[len(args) :]:
        if a.name in known and a.name not in kwargs and a.has_default_value():
            theirs = known[a.name]
            if not theirs.has_default_value() or theirs.default_value != a.default_value:
                found[a.name] = a.default_value
    return found


def drop(kwargs: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {k: v for k, v in kwargs.items() if k not in names}


def squeezed(target: torch._ops.OpOverload, args: Any, kwargs: Mapping[str, Any]) -> list[int]:
    """The dims that a squeeze took away when it was traced: of size 1 whatever the rows."""
    shape = args[0].meta["val"].shape
    names = (a.name for a in target._schema.arguments)
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    dims = given.get("dim", range(len(shape)))
    dims = {d % len(shape) for d in ([dims] if isinstance(dims, int) else dims) if shape}
    return [d for d in sorted(dims) if isinstance(shape[d], int) and shape[d] == 1]


class Flattener:
    def __init__(self, export: Export, model: nn.Module) -> None:
        self.program = export.program
        self.leaves = export.leaves
        self.shared = shared_names(model)
        self.trainable = {
            n: p.requires_grad for n, p in model.named_parameters(remove_duplicate=False)
        }
        self.graph = torch.fx.Graph()
        self.constants: dict[str, Tensor] = {}
        self.position = 0
        self.autocast: Autocast | None = None
        self.policies: dict[Any, torch.dtype | None] = {}
        self.no_grad = False
        self.cast_nodes: dict[tuple[Node, torch.dtype, Owners], Node] = {}

    def run(self) -> tuple[torch.fx.Graph, dict[str, Tensor], set[sympy.Symbol]]:
        rows = self.placeholder("rows", "rows", "rows", None)
        env = self.placeholders()
        self.sizes = Sizes(self.graph, rows, self.symbols(rows))
        outputs = self.inline(self.program.graph_module, env)
        nodes = tuple(cell.node for cell in outputs)
        if not all(isinstance(n, Node) for n in nodes):
            raise Untraceable(
                "the loss depends neither on the batch nor on parameters: return a tensor "
                "computed by the model"
            )
        self.graph.output(nodes)
        return self.graph, self.constants, self.sizes.symbols

    def placeholder(self, target: str, role: str, name: str, val: Any) -> Node:
        node = self.graph.placeholder(target)
        trainable = role == "parameter" and self.trainable[name] and has_gradients(val.dtype)
        node.meta.update(role=role, name=name, val=val, owner=(), differentiable=trainable)
        return node

    def placeholders(self) -> Environment:
        """Placeholders by role; one for all the names of a shared tensor."""
        env: Environment = {}
        made: dict[str, Cell] = {}
        leaves = iter(self.leaves)
        holders = {n.name: n for n in self.program.graph.find_nodes(op="placeholder")}
        for spec in self.program.graph_signature.input_specs:
            old = holders[spec.arg.name]
            target = (spec.target or "").removeprefix("model.")
            if spec.kind == InputKind.USER_INPUT:
                if not isinstance(old.meta.get("val"), Tensor):
                    continue  # a number, string or None: export has put its value where it is read
                role, target = "leaf", next(leaves)
            elif self.foreign(spec):
                role = "constant"
                self.constants[target] = self.foreign_tensor(spec.target or "")
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                role = "parameter" if spec.kind == InputKind.PARAMETER else "buffer"
                target = self.shared.get(target, target)
            else:
                raise Untraceable(
                    f"the model uses an object that is not a tensor ({spec.kind.name.lower()})"
                )
            if target not in made or role == "leaf":
                made[target] = Cell(
                    self.placeholder(f"{role}_{old.name}", role, target, old.meta["val"])
                )
            env[old] = made[target]
        return env

    def foreign(self, spec: InputSpec) -> bool:
        """Whether a tensor is no part of the model: made by its code, or held by the loss."""
        kinds = (InputKind.PARAMETER, InputKind.BUFFER)
        of_loss = spec.kind in kinds and not (spec.target or "").startswith("model.")
        return of_loss or spec.kind == InputKind.CONSTANT_TENSOR

    def foreign_tensor(self, name: str) -> Tensor:
        """Its value. ValueError for a learnable one: no update would reach it."""
        tensors = (self.program.state_dict, self.program.constants)
        tensor: Tensor = next(t[name] for t in tensors if name in t)
        if tensor.requires_grad:
            raise ValueError(
                f"the loss has learnable parameters of its own ({name} of shape "
                f"{list(tensor.shape)}), which would not be trained: make them part of the model"
            )
        return tensor.detach()

    def symbols(self, rows: Node) -> set[sympy.Symbol]:
        """The symbols that stand for the rows; Untraceable where tracing fixed their number."""
        found = set()
        for node in self.graph.find_nodes(op="placeholder"):
            if node.meta["role"] == "leaf" and node.meta["val"].dim() > 0:
                size = node.meta["val"].shape[0]
                if isinstance(size, int) or not size.node.expr.is_Symbol:
                    raise Untraceable(
                        f"the number of rows was fixed to {size} while tracing: the model "
                        "computes a shape or takes a branch from the batch size; make it "
                        "independent of the number of rows"
                    )
                found.add(size.node.expr)
                rows.meta["rows"] = int(size.node.hint)
        return found

    # -- walking the exported graphs -----------------------------------------------------

    def inline(self, module: torch.fx.GraphModule, env: Environment) -> tuple[Any, ...]:
        """Copy a (sub-)graph whose placeholders are in `env`; returns the cells of its outputs."""
        nodes = list(module.graph.nodes)
        start = self.position
        self.position += len(nodes)
        place = {n: start + i for i, n in enumerate(nodes)}
        for node in nodes:
            if node.op == "output":
                return tuple(
                    env.get(a, a) if isinstance(a, Node) else Cell(a) for a in node.args[0]
                )
            if node.op == "call_function":
                self.now = place[node]
                env[node] = self.call(module, node, env)
            elif node.op == "get_attr":
                env[node] = getattr(module, node.target)
            if isinstance(cell := env.get(node), Cell):
                cell.readers.extend(place[user] for user in node.users)
        raise AssertionError("a graph ends with its output")

    def call(self, module: torch.fx.GraphModule, node: Node, env: Environment) -> Any:
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.region(node, env)
        val = node.meta.get("val")
        if node.target is operator.getitem and isinstance(env[node.args[0]], tuple):  # type: ignore[index]
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        if isinstance(val, (int, torch.SymInt)) and not isinstance(val, bool):
            return Cell(self.sizes(val))
        if not isinstance(node.target, torch._ops.OpOverload):
            made = self.emit(node, node.target, self.plain(node.args, env), {})
            return Cell(made, self.storage_of_item(node, env))
        name = short_name(node)
        if name in DROPPED or isinstance(val, (torch.SymBool, bool)):
            return Cell(None)
        if same := self.identity(node, name, env):
            return same
        if writes(node):
            return self.write(node, name, env)
        args, kwargs = self.plain(node.args, env), self.plain(node.kwargs, env)
        cell = Cell(self.emit(node, *self.settled(node.target, args, kwargs, val)))
        source = viewed(node)
        if source is not None and isinstance(env.get(source), Cell):
            cell.storage.cells.remove(cell)
            cell.storage = env[source].storage
            cell.storage.cells.append(cell)
            if name in ("select", "slice"):
                cell.made = (env[source], name, args[1:])
        if name in ("batch_norm", "instance_norm"):
            self.running_statistics(cell.node, name)
        return cell

    def settled(
        self, target: torch._ops.OpOverload, args: Any, kwargs: Any, val: Any
    ) -> tuple[torch._ops.OpOverload, Any, Any]:
        """The operator with what it found out from its operands' sizes and types written down.

        A rank's block may have one row, and its part of a dim one entry, where the whole has more.
        """
        name = target._schema.name.split("::")[1]
        if name in SHAPED_AS:
            resize, sizes = SHAPED_AS[name], [self.sizes(s) for s in val.shape]
            return resize, (args[0], sizes), {}
        if name in RESIZES and target._overloadname != "dtype":
            sizes = [self.sizes(s) for s in val.shape]
            return target, (args[0], sizes, *args[2:]), drop(kwargs, "size", "shape")
        if name == "squeeze":
            return aten.squeeze.dims, (args[0], squeezed(target, args, kwargs)), {}
        if name == "type_as":
            return aten.to.dtype, (args[0], val.dtype), {}
        if name == "embedding":  # a gradient of few rows adds up as one of all rows
            return target, args[:4], drop(kwargs, "sparse")
        return target, args, kwargs

    def storage_of_item(self, node: Node, env: Environment) -> Storage | None:
        """The pieces of split and chunk share memory, the results of topk do not."""
        source = node.args[0] if node.args else None
        if not isinstance(source, Node) or not isinstance(source.target, torch._ops.OpOverload):
            return None
        found = env.get(source)
        return found.storage if isinstance(found, Cell) and viewed(source) is not None else None

    def plain(self, args: Any, env: Environment) -> Any:
        """Arguments with this graph's nodes (and plain ints for constant sizes)."""

        def read(n: Node) -> Any:
            found = env[n]
            if not isinstance(found, Cell):
                raise Untraceable(f"the operator {n.target} has no equivalent in a flat graph")
            return found.node

        return map_arg(args, read)

    def region(self, node: Node, env: Environment) -> tuple[Any, ...]:
        """Inline a region: no_grad detaches its outputs, autocast casts inside."""
        kind = node.target.name()  # type: ignore[union-attr]
        if kind == "wrap_with_set_grad_enabled":
            enabled, inner, *inputs = node.args
        elif kind == "wrap_with_autocast":
            device, dtype, enabled, _, inner, *inputs = node.args
        else:
            raise Untraceable(
                f"{line_of(node)} uses the control-flow operator {kind}, which has no equivalent "
                "in a flat graph: use tensor operations (torch.where), or train the model as it "
                "is under the plan 'data'"
            )
        graph = env[inner]  # type: ignore[index]
        holders = graph.graph.find_nodes(op="placeholder")
        inside = {
            h: env[i] if isinstance(i, Node) else Cell(i)
            for h, i in zip(holders, inputs, strict=True)
        }
        if kind == "wrap_with_set_grad_enabled":
            outer, self.no_grad = self.no_grad, not enabled
            outputs = self.inline(graph, inside)
            self.no_grad = outer
            return outputs if enabled else tuple(self.detach(o) for o in outputs)
        before = self.autocast
        self.autocast = Autocast(device, dtype) if enabled else None  # type: ignore[arg-type]
        outputs = self.inline(graph, inside)
        self.autocast = before
        return outputs

    def detach(self, cell: Any) -> Any:
        node = cell.node if isinstance(cell, Cell) else None
        if not isinstance(node, Node) or not node.meta["differentiable"]:
            return cell
        detached = self.graph.call_function(aten.detach.default, (node,))
        kept = {k: v for k, v in node.meta.items() if k in ("val", "owner", "stack_trace")}
        detached.meta.update(kept, differentiable=False)
        return Cell(detached)

    # -- nodes of the new graph ----------------------------------------------------------

    def emit(self, old: Node, target: Any, args: Any, kwargs: Mapping[str, Any]) -> Node:
        if self.autocast is not None and isinstance(target, torch._ops.OpOverload):
            key = (self.autocast, target, len(args), *kwargs)
            if key not in self.policies:  # autocast decides by operator and arguments given
                self.policies[key] = casts(self.autocast, target, args, kwargs)
            wanted = self.policies[key]
            if wanted is not None:
                args, kwargs = map_arg(
                    (args, dict(kwargs)), lambda n: self.cast(n, wanted, owner(old))
                )
        node = self.graph.call_function(target, args, dict(kwargs))
        val = old.meta.get("val")
        values = val if isinstance(val, (tuple, list)) else (val,)
        continuous = any(isinstance(v, Tensor) and has_gradients(v.dtype) for v in values)
        stops = target in (aten.detach.default, aten.detach_.default)
        node.meta.update(
            val=tuple(val) if isinstance(val, (tuple, list)) else val,
            owner=owner(old),
            stack_trace=old.meta.get("stack_trace"),
            differentiable=continuous
            and not stops
            and any(n.meta["differentiable"] for n in node.all_input_nodes),
        )
        return node

    def cast(self, node: Node, dtype: torch.dtype, where: Owners) -> Node:
        """`node` as `dtype`, made once in each module that asks."""
        val = node.meta.get("val")
        if not isinstance(val, Tensor) or val.dtype not in CASTABLE or val.dtype == dtype:
            return node
        key = (node, dtype, where)
        if key in self.cast_nodes:
            return self.cast_nodes[key]
        made = self.graph.call_function(aten.to.dtype, (node, dtype))
        made.meta.update(
            val=val.to(dtype), owner=where, differentiable=node.meta["differentiable"]
        )
        if node.meta.get("role") != "buffer":  # its content may change
            self.cast_nodes[key] = made
        return made

    def identity(self, node: Node, name: str, env: Environment) -> Cell | None:
        """The cell that `node` merely repeats: cast to the same type, whole slice, no dropout."""
        source = env.get(node.args[0]) if node.args and isinstance(node.args[0], Node) else None
        if not isinstance(source, Cell) or not isinstance(source.node, Node):
            return None
        val, given = node.meta.get("val"), source.node.meta.get("val")
        if not isinstance(val, Tensor) or not isinstance(given, Tensor):
            return None
        if name in LIFTS:
            cell = Cell(source.node)
            cell.storage.fresh = True
            return cell
        names = (a.name for a in schema(node).arguments)
        args = dict(zip(names, node.args, strict=False)) | node.kwargs
        off = name in DROPOUTS and (args["p"] == 0 or not args["train"])
        kept = (val.dtype, val.device) == (given.dtype, given.device)
        same_type = name == "to" and kept and not args.get("copy")
        whole = name in ("slice", "expand") and args.get("step", 1) == 1 and same_shape(val, given)
        return source if off or same_type or whole or name == "alias" else None

    def running_statistics(self, node: Node, name: str) -> None:
        """Batch norm updates its running statistics in training, which its schema does not say."""
        running = [
            a for a in node.args[3:5] if isinstance(a, Node) and a.meta.get("role") == "buffer"
        ]
        if node.args[5] and running:
            node.meta["effect"] = tuple(a.meta["name"] for a in running)

    # -- in-place operators --------------------------------------------------------------

    def write(self, node: Node, name: str, env: Environment) -> Cell:
        cells = [env[n] for n in written(node)]
        cell = cells[0] if cells else None
        if not isinstance(cell, Cell) or len(cells) > 1:
            raise Untraceable(
                f"{line_of(node)} writes into arguments of {node.target}: return new tensors"
            )
        args, kwargs = self.plain(node.args, env), self.plain(node.kwargs, env)
        owners = [c.node for c in cell.storage.cells if c.node.op == "placeholder"]
        for held in owners if not cell.storage.fresh else ():
            if held.meta["role"] in ("parameter", "constant"):
                raise Untraceable(
                    f"{line_of(node)} changes {held.meta['name']}, which is no buffer, in place "
                    f"({node.target}): a trace follows changes of buffers alone, so make it one "
                    "(register_buffer), or train the model as it is under the plan 'data'"
                )
        if buffers := [o for o in owners if o.meta["role"] == "buffer"]:
            if self.no_grad:  # else the buffer would remember how its content was computed
                args, kwargs = map_arg((args, kwargs), lambda n: self.detach(Cell(n)).node)
            made = self.emit(node, node.target, args, kwargs)
            made.meta.update(effect=tuple(b.meta["name"] for b in buffers), differentiable=False)
            return Cell(made, cell.storage)
        if not schema(node).arguments[0].is_write:
            raise Untraceable(
                f"{line_of(node)} writes into an argument of {node.target}: return new tensors"
            )
        new = self.out_of_place(node, name, args, kwargs)
        self.replace(node, cell, new)
        return cell

    def out_of_place(self, node: Node, name: str, args: Any, kwargs: Any) -> Node:
        val = node.meta["val"]
        if name == "copy_":
            source = self.emit(node, aten.to.dtype, (args[1], val.dtype), {})
            return self.emit(
                node, aten.expand.default, (source, [self.sizes(s) for s in val.shape]), {}
            )
        base = (
            DUNDERS.get(name)
            or {"normal_": "normal_functional"}.get(name)
            or name.removesuffix("_")
        )
        assert isinstance(node.target, torch._ops.OpOverload)
        given = node.target._overloadname
        overload = "p" if (base, given) == ("bernoulli", "float") else given
        target = getattr(getattr(aten, base, None), overload, None)
        if target is None or name == base:
            raise Untraceable(
                f"{line_of(node)} changes a tensor in place ({name}): use an operator that "
                "returns a new tensor"
            )
        kwargs = {**unlike_defaults(node, target, args, kwargs), **kwargs}
        new = self.emit(node, *self.settled(target, args, kwargs, val))
        others = [a for a in new.all_input_nodes if isinstance(a.meta.get("val"), Tensor)]
        if any(a.meta["val"].dtype != val.dtype for a in others):
            new = self.emit(node, aten.to.dtype, (new, val.dtype), {})
        return new

    def replace(self, node: Node, cell: Cell, new: Node) -> None:
        """`new` is what `cell` holds from now on; tensors it is a slice of change with it."""
        fresh = {id(cell)}
        cell.node = new
        made, part = cell.made, new
        while made is not None:
            parent, name, rest = made
            scatter = (
                aten.select_scatter.default if name == "select" else aten.slice_scatter.default
            )
            whole = self.graph.call_function(scatter, (parent.node, part, *rest))
            whole.meta.update(parent.node.meta, owner=owner(node))
            whole.meta["stack_trace"] = node.meta.get("stack_trace")
            for key in ("role", "name", "effect"):
                whole.meta.pop(key, None)
            whole.meta["differentiable"] |= part.meta["differentiable"]
            parent.node = part = whole
            fresh.add(id(parent))
            made = parent.made
        for other in cell.storage.cells:
            if id(other) not in fresh and any(r > self.now for r in other.readers):
                raise Untraceable(
                    f"{line_of(node)} changes a tensor in place ({node.target}) of which a view "
                    "is read afterwards: use an operator that returns a new tensor"
                )
