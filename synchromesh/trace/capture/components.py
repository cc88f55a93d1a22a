"""The modules that become components: found in the module tree by its repeated blocks.

    encoder.layer.0 (a block)           components
      attention                    ->   encoder.layer.0.attention
      layernorm_after              ->   joins what it feeds: encoder.layer.0.mlp
      mlp                          ->   encoder.layer.0.mlp
    classifier                     ->   classifier

A block is a child of a container (ModuleList, Sequential, ModuleDict) with at least two direct
children that hold parameters and are no norms, and with no further block inside. A layer that has
one such child alone, made up of others, is a component as it is:

    layers.0 (norm, mixer)         ->   layers.0"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn

LISTS = (nn.ModuleList, nn.ModuleDict)
Child = tuple[str, nn.Module]


@dataclass(frozen=True)
class ComponentModule:
    """A module that is a component, or a norm that joins one of the components of its `group`."""

    path: str
    norm: bool = False
    batch_norm: bool = False  # joins the component before it
    group: str | None = None  # path of the block or container; None: stands freely


def component_modules(model: nn.Module, cuts: Sequence[str] = ()) -> tuple[ComponentModule, ...]:
    """Those of a model, in the order of its module tree, and those that `cuts` names; ValueError
    for a name that no module has."""
    modules = list(visit(model, ""))
    if not modules and any(True for _ in model.parameters()):
        modules = [ComponentModule("")]
    names = {name for name, _ in model.named_modules(remove_duplicate=False)}
    for cut in cuts:
        if cut not in names:
            near = difflib.get_close_matches(cut, sorted(names - {""}), n=3)
            hint = f" (near: {', '.join(near)})" if near else ""
            raise ValueError(f"the model has no module {cut!r}{hint}")
        at = next((i for i, p in enumerate(modules) if p.path == cut), None)
        if at is not None:
            modules[at] = replace(modules[at], norm=False)
        elif not any(p.path.startswith(f"{cut}.") for p in modules):
            modules.append(ComponentModule(cut))
    return tuple(modules)


def root_name(model: nn.Module) -> str:
    return type(model).__name__.lower()


def visit(module: nn.Module, path: str) -> Iterator[ComponentModule]:
    """Components of a module that is none itself: the root, or one with blocks inside."""
    if is_container(module):
        yield from visit_container(module, path)
        return
    for name, child in children(module, path):
        if is_container(child) or holds_block(child):
            yield from visit(child, name)
        else:
            yield component_module(name, child, None)


def visit_container(container: nn.Module, path: str) -> Iterator[ComponentModule]:
    for name, child in children(container, path):
        if isinstance(child, LISTS) or holds_block(child):
            yield from visit(child, name)
        elif sum(not is_norm(m) for _, m in inner_children(child, "")) >= 2:  # a block
            for part, inner in inner_children(child, name):
                yield component_module(part, inner, name)
        else:
            group = path if isinstance(container, nn.Sequential) else None
            yield component_module(name, child, group)


def component_module(path: str, module: nn.Module, group: str | None) -> ComponentModule:
    batch_norm = is_norm(module) and "BatchNorm" in type(module).__name__
    return ComponentModule(path, is_norm(module), batch_norm, group)


def children(module: nn.Module, path: str) -> Iterator[Child]:
    for name, child in module._modules.items():
        if child is not None and any(True for _ in child.parameters()):
            yield f"{path}.{name}" if path else name, child


def inner_children(module: nn.Module, path: str) -> Iterator[Child]:
    for name, child in children(module, path):
        if isinstance(child, LISTS):
            yield from inner_children(child, name)
        else:
            yield name, child


def is_container(module: nn.Module) -> bool:
    """Whether the module does no more than hold others, or run them one after another."""
    plain = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return plain or isinstance(module, LISTS)


def is_norm(module: nn.Module) -> bool:
    return "Norm" in type(module).__name__


def is_layer(module: nn.Module) -> bool:
    """Whether a child of a container is a block, or has one in its place beside norms."""
    if isinstance(module, LISTS):
        return False
    inner = [m for _, m in inner_children(module, "") if not is_norm(m)]
    return len(inner) > 1 or (len(inner) == 1 and is_layer(inner[0]))


def holds_block(module: nn.Module) -> bool:
    """Whether a block, or another layer, is somewhere below `module`."""
    containers = (m for m in module.modules() if is_container(m))
    return any(is_layer(child) for c in containers for _, child in children(c, ""))
