"""Flattening: the exported program as one graph without regions, asserts, in-place operators."""

import operator
from collections.abc import Iterable
from typing import Any

import sympy  # type: ignore[import-untyped]
import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import map_arg

from synchromesh.trace import meta

from ..nodes import is_operator, line_of, same_shape, schema, short_name, viewed, writes, written
from .coupling import NORMS
from .export import Export, Untraceable
from .flat_graph import Autocast, Cell, Environment, FlatGraph, Sizes, cell_of
from .normal_form import (
    ASSERTS,
    LIFTS,
    asks_sparse,
    changes_nothing,
    other_defaults,
    out_of_place,
    settled,
)
from .selection import Selections

aten = torch.ops.aten
HELD = {InputKind.PARAMETER: "parameter", InputKind.BUFFER: "buffer"}  # by a module: the role


def shared_names(model: nn.Module) -> dict[str, str]:
    """Every further name of a parameter or buffer -> the name that the model gives it first."""
    first: dict[int, str] = {}
    shared = {}
    for group in (model.named_parameters, model.named_buffers):
        for name, tensor in group(remove_duplicate=False):
            if first.setdefault(id(tensor), name) != name:
                shared[name] = first[id(tensor)]
    return shared


Flat = tuple[Graph, dict[str, Tensor], set[sympy.Symbol]]


def flatten(export: Export, model: nn.Module) -> Flat:
    return Flattener(export, model).run()


class Flattener:
    """Walks the exported program's graphs and writes the flat one. position: of all nodes."""

    def __init__(self, export: Export, model: nn.Module) -> None:
        self.program = export.program
        self.leaves = export.leaves
        self.fixed = export.fixed
        self.shared = shared_names(model)
        named = model.named_parameters(remove_duplicate=False)
        self.flat = FlatGraph({n: p.requires_grad for n, p in named})
        self.constants: dict[str, Tensor] = {}
        self.walked = 0
        self.position = 0
        self.no_grad = False

    def run(self) -> Flat:
        rows = self.flat.placeholder("rows", "rows", "rows", None)
        env = self.placeholders()
        self.sizes = Sizes(self.flat.graph, rows, self.symbols(rows))
        self.selections = Selections(self.flat, self.sizes)
        outputs = self.inline(self.program.graph_module, env)
        nodes = tuple(cell.node for cell in outputs)
        if not all(isinstance(n, Node) for n in nodes):
            raise Untraceable(
                "the loss depends neither on the batch nor on parameters: return a tensor "
                "computed by the model"
            )
        self.flat.graph.output(nodes)
        return self.flat.graph, self.constants, self.sizes.symbols

    def placeholders(self) -> Environment:
        """Placeholders by role; one for all the names of a shared tensor."""
        env: Environment = {}
        cells: dict[str, Cell] = {}
        leaves = iter(self.leaves)
        holders = {n.name: n for n in self.program.graph.find_nodes(op="placeholder")}
        for spec in self.program.graph_signature.input_specs:
            old = holders[spec.arg.name]
            target = spec.target or ""
            name = target.removeprefix("model.")
            of_loss = spec.kind in HELD and not target.startswith("model.")
            if spec.kind == InputKind.USER_INPUT:
                if not isinstance(meta.val(old), Tensor):
                    continue  # a number, string or None: export has put its value where it is read
                role, name = "leaf", next(leaves)
            elif spec.kind == InputKind.CONSTANT_TENSOR or of_loss:
                role = "constant"  # no part of the model: made by its code, or the loss's own
                self.constants[name] = self.foreign_tensor(target)
            elif spec.kind in HELD:
                role, name = HELD[spec.kind], self.shared.get(name, name)
            else:
                raise Untraceable(
                    f"the model uses an object that is not a tensor ({spec.kind.name.lower()})"
                )
            if name not in cells or role == "leaf":
                node = self.flat.placeholder(f"{role}_{old.name}", role, name, meta.val(old))
                cells[name] = Cell(node)
            env[old] = cells[name]
        return env

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
        of_rows = set()
        for leaf in meta.placeholders(self.flat.graph, "leaf"):
            if meta.val(leaf).dim() > 0:
                size = meta.val(leaf).shape[0]
                if isinstance(size, int) or not size.node.expr.is_Symbol:
                    where = "at {} ({!r})".format(*self.fixed) if self.fixed else "by the model"
                    raise Untraceable(
                        f"the number of rows was fixed to {size} while tracing, {where}: it "
                        "computes a shape or a Python number, as float(len(x)) is, or takes a "
                        "branch from the batch size; make it independent of the number of rows "
                        "(len(x) and x.shape[0] may stay as they are), or train the model as it "
                        "is under the plan 'data'"
                    )
                of_rows.add(size.node.expr)
                meta.example_rows.set(rows, int(size.node.hint))
        return of_rows

    def inline(self, module: GraphModule, env: Environment) -> tuple[Any, ...]:
        """Copy a (sub-)graph whose placeholders are in `env`; returns the cells of its outputs."""
        nodes = list(module.graph.nodes)
        position = {n: self.walked + i for i, n in enumerate(nodes)}
        self.walked += len(nodes)
        for node in nodes:
            if node.op == "output":
                made = node.args[0]
                return tuple(env.get(a, a) if isinstance(a, Node) else Cell(a) for a in made)
            if node.op == "call_function":
                self.position = position[node]
                env[node] = self.call(node, env)
            elif node.op == "get_attr":
                env[node] = getattr(module, node.target)
            if cell := cell_of(node, env):
                cell.readers.extend(position[user] for user in node.users)
        raise AssertionError("a graph ends with its output")

    def call(self, node: Node, env: Environment) -> Any:
        """What an exported call stands for: a cell, or a tuple of them for a region."""
        if isinstance(node.target, torch._ops.HigherOrderOperator):
            return self.region(node, env)
        if node.target is operator.getitem and isinstance(env[node.args[0]], tuple):  # type: ignore[index]
            return env[node.args[0]][node.args[1]]  # type: ignore[index]
        name, val = short_name(node), meta.val(node)
        if name == "broadcast_tensors":
            return self.broadcast(node, env)
        if name in ASSERTS or isinstance(val, (torch.SymBool, bool)):
            return Cell(None)
        if isinstance(val, (int, torch.SymInt)):
            return self.integer(node, env)
        if isinstance(val, (torch.SymFloat, float)) and is_operator(node):
            raise Untraceable(
                f"{line_of(node)} makes a Python number of a tensor: compute with the tensor, "
                "or train the model as it is under the plan 'data'"
            )
        if not is_operator(node):
            return self.item(node, env)
        if same := self.identity(node, name, env):
            return same
        return self.write(node, name, env) if writes(node) else self.operator(node, name, env)

    def integer(self, node: Node, env: Environment) -> Cell:
        """A number of selected entries, or one that is computed from the rows."""
        item = cell_of(node.args[0], env) if node.target is aten.item.default else None
        selected = self.selections.number(node, item.node if item else None)
        return Cell(selected or self.sizes(meta.val(node)))

    def operator(self, node: Node, name: str, env: Environment) -> Cell:
        """An operator without in-place effects, those of running statistics aside."""
        args, kwargs = self.mapped((node.args, node.kwargs), env)
        if (selected := self.selections.written(node, name, args, kwargs)) is not None:
            return Cell(selected)
        cell = Cell(self.emit_settled(node, node.target, args, kwargs))
        source = cell_of(viewed(node), env)
        if source is not None:
            cell.share(source)
            if name in ("select", "slice"):
                cell.part_of = (source, name, args[1:])
        if name in NORMS and cell.node.args[5]:
            # in training it updates its running statistics, which its schema does not say
            running = [a for a in cell.node.args[3:5] if isinstance(a, Node)]
            if buffers := buffers_among(running):
                meta.effect.set(cell.node, buffers)
        return cell

    def broadcast(self, node: Node, env: Environment) -> tuple[Cell, ...]:
        """Several tensors, each expanded to the shape of all: they share nothing but that."""
        cells = []
        for val, tensor in zip(meta.val(node), node.args[0], strict=True):  # type: ignore[arg-type]
            source = cell_of(tensor, env)
            assert source is not None
            if not same_shape(val, meta.val(tensor)):
                sizes = [self.sizes(s) for s in val.shape]
                args = (source.node, sizes)
                expanded = self.flat.emit(node, aten.expand.default, args, {}, val)
                source = Cell(expanded, source.storage)
            cells.append(source)
        return tuple(cells)

    def emit_settled(self, node: Node, target: Any, args: Any, kwargs: Any) -> Node:
        call = settled(target, args, kwargs, meta.val(node), self.sizes)
        made = self.flat.emit(node, *call)
        if asks_sparse(target, args, kwargs):
            meta.sparse.set(made, True)
        return made

    def item(self, node: Node, env: Environment) -> Cell:
        """An entry of a result: those of split and chunk share memory, those of topk do not."""
        args = self.mapped(node.args, env)
        source = node.args[0] if node.args else None
        val = None  # of selected entries not what it was exported as
        if node.target is operator.getitem:
            val = meta.val(args[0])[args[1]]
        cell = Cell(self.flat.emit(node, node.target, args, {}, val))
        if isinstance(source, Node) and is_operator(source) and viewed(source) is not None:
            source_cell = cell_of(source, env)
            if source_cell is not None:
                cell.share(source_cell)
        return cell

    def mapped(self, args: Any, env: Environment) -> Any:
        """Arguments with this graph's nodes (and plain ints for constant sizes)."""

        def read(n: Node) -> Any:
            cell = cell_of(n, env)
            if cell is None:
                raise Untraceable(f"the operator {n.target} has no equivalent in a flat graph")
            return cell.node

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
        cells = (env[i] if isinstance(i, Node) else Cell(i) for i in inputs)
        inside = dict(zip(holders, cells, strict=True))
        if kind == "wrap_with_set_grad_enabled":
            outer, self.no_grad = self.no_grad, not enabled
            outputs = self.inline(graph, inside)
            self.no_grad = outer
            return outputs if enabled else tuple(map(self.detached, outputs))
        before = self.flat.autocast
        self.flat.autocast = Autocast(device, dtype) if enabled else None  # type: ignore[arg-type]
        outputs = self.inline(graph, inside)
        self.flat.autocast = before
        return outputs

    def detached(self, cell: Any) -> Any:
        node = self.flat.detach(cell.node) if isinstance(cell, Cell) else None
        return cell if node is None or node is cell.node else Cell(node)

    def identity(self, node: Node, name: str, env: Environment) -> Cell | None:
        """The cell that `node` merely repeats, None where it computes something."""
        source = cell_of(node.args[0], env) if node.args else None
        if source is None or not isinstance(source.node, Node):
            return None
        if not all(isinstance(meta.val(n), Tensor) for n in (node, source.node)):
            return None
        if name in LIFTS:
            cell = Cell(source.node)
            cell.storage.fresh = True
            return cell
        return source if changes_nothing(node, name, source.node) else None

    def write(self, node: Node, name: str, env: Environment) -> Cell:
        """An in-place operator: an effect on buffers, else a new node for its cell."""
        cells = [cell_of(n, env) for n in written(node)]
        cell = cells[0] if len(cells) == 1 else None
        if cell is None:
            raise Untraceable(
                f"{line_of(node)} writes into arguments of {node.target}: return new tensors"
            )
        args, kwargs = self.mapped((node.args, node.kwargs), env)
        if self.selections.mask_of(cell.node) is not None:
            raise Untraceable(f"{line_of(node)} changes selected entries: return new ones")
        roots = cell.storage.placeholders()
        if not cell.storage.fresh:
            refuse_lost_writes(node, roots)
        if buffers := buffers_among(roots):
            if self.no_grad:  # else the buffer would remember how its content was computed
                args, kwargs = map_arg((args, kwargs), self.flat.detach)
            made = self.flat.emit(node, node.target, args, kwargs)
            meta.effect.set(made, buffers)
            meta.differentiable.set(made, False)
            return Cell(made, cell.storage)
        if not schema(node).arguments[0].is_write:
            raise Untraceable(
                f"{line_of(node)} writes into an argument of {node.target}: return new tensors"
            )
        self.replace(node, cell, self.new_content(node, name, args, kwargs))
        return cell

    def new_content(self, node: Node, name: str, args: Any, kwargs: Any) -> Node:
        """What an in-place operator writes, as a node of its own."""
        val, emit = meta.val(node), self.flat.emit
        if name == "copy_":
            source = emit(node, aten.to.dtype, (args[1], val.dtype), {})
            sizes = [self.sizes(s) for s in val.shape]
            return emit(node, aten.expand.default, (source, sizes), {})
        target = out_of_place(node, name, line_of(node))
        kwargs = {**other_defaults(node, target, args, kwargs), **kwargs}
        new = self.emit_settled(node, target, args, kwargs)
        inputs = [meta.val(a) for a in new.all_input_nodes]
        if any(isinstance(x, Tensor) and x.dtype != val.dtype for x in inputs):
            new = emit(node, aten.to.dtype, (new, val.dtype), {})
        return new

    def replace(self, node: Node, cell: Cell, new: Node) -> None:
        """`new` is what `cell` stands for from now on; tensors it is a slice of change with it."""
        cell.node = new
        changed = [cell]
        while (part_of := changed[-1].part_of) is not None:
            whole, kind, place = part_of
            whole.node = self.flat.scatter(node, whole, changed[-1].node, kind, place)
            changed.append(whole)
        for other in cell.storage.cells:
            stale = not any(other is c for c in changed)
            if stale and any(r > self.position for r in other.readers):
                raise Untraceable(
                    f"{line_of(node)} changes a tensor in place ({node.target}) of which a view "
                    "is read afterwards: use an operator that returns a new tensor"
                )


def buffers_among(nodes: Iterable[Node]) -> tuple[str, ...]:
    return tuple(meta.name(n) for n in nodes if meta.role(n) == "buffer")


def refuse_lost_writes(node: Node, roots: Iterable[Node]) -> None:
    for root in roots:
        if meta.role(root) in ("parameter", "constant"):
            raise Untraceable(
                f"{line_of(node)} changes {meta.name(root)}, which is no buffer, in place "
                f"({node.target}): a trace follows changes of buffers alone, so make it one "
                "(register_buffer), or train the model as it is under the plan 'data'"
            )
