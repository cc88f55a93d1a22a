"""Optimizers: several as one, and those whose update of one entry depends on others: by name, or
shown on a small one."""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

# those of torch 2.13 whose source says that an entry's update depends on its own history alone
ELEMENTWISE = {
    "ASGD", "Adadelta", "Adagrad", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Rprop",
    "SGD",
}  # fmt: skip
# what an update of one entry depends on besides, by class name in lower case, of any package
COUPLED = {
    "adafactor": "row and column means of the gradient, and the norm of the whole update",
    "muon": "an orthogonalisation of the whole matrix",
    **dict.fromkeys(("lamb", "lars"), "the norm of the whole parameter"),
    "novograd": "the norm of the whole gradient",
    **dict.fromkeys(("shampoo", "distributedshampoo", "soap"), "factors of the whole gradient"),
    "came": "row and column means of the gradient",
    **dict.fromkeys(("prodigy", "dadaptadam", "dadaptsgd"), "sums over all parameters"),
    **dict.fromkeys(("adam8bit", "adamw8bit"), "blocks of neighbouring entries"),
}
# those of torch 2.13 that step by a sparse gradient as by the same one dense, and with which
# settings they do not; SparseAdam takes no other
SPARSE = {
    "SGD": ("momentum", "weight_decay", "fused"),
    "Adagrad": ("weight_decay", "fused"),
    "SparseAdam": (),
}
REFUSED = {"lbfgs": "it keeps own copies of all parameters and calls the loss again"}


class JoinedOptimizer(Optimizer):
    """Optimizers over different parameters, each of a loss, as one: their groups, and one state.

    named: each by the name of its loss; several losses may have the same one. parts: the one of
    most numbers comes first, which all are taken for where costs and states are predicted."""

    def __init__(self, named: Mapping[str, Optimizer]) -> None:
        """ValueError where two of them have the same parameter."""
        self.named = dict(named)
        owner: dict[int, Optimizer] = {}
        for name, optimizer in self.named.items():
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                if owner.setdefault(id(p), optimizer) is not optimizer:
                    raise ValueError(
                        f"the optimizer of the loss {name!r} and another one have a parameter of "
                        f"shape {tuple(p.shape)} in common: give each parameter to one optimizer, "
                        "and to both losses this one, or train the sum of the losses"
                    )
        parts = dict.fromkeys(self.named.values())
        self.parts = tuple(sorted(parts, key=_numbers, reverse=True))
        self.state = defaultdict(dict)
        for optimizer in parts:
            self.state.update(optimizer.state)
            optimizer.state = self.state

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.parts for group in optimizer.param_groups]


def _numbers(optimizer: Optimizer) -> int:
    return sum(p.numel() for group in optimizer.param_groups for p in group["params"])


def parts_of(optimizer: Optimizer) -> tuple[Optimizer, ...]:
    """The optimizers that it is made of; itself where it is one."""
    return optimizer.parts if isinstance(optimizer, JoinedOptimizer) else (optimizer,)


def kind_of(optimizer: Optimizer) -> str:
    """The name of its class, or those of several behind the names of their losses."""
    named = optimizer.named if isinstance(optimizer, JoinedOptimizer) else {"": optimizer}
    return ", ".join(f"{n} {type(part).__name__}".strip() for n, part in named.items())


def needed_arguments(step: Callable[..., Any]) -> list[str]:
    """Arguments without which `step`, of an optimizer or a scheduler, cannot be called."""
    asked = signature(step).parameters.values()
    return [p.name for p in asked if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD]


def refuse_unusable(optimizer: Optimizer) -> None:
    """ValueError for optimizers that cannot run under any plan."""
    for part in parts_of(optimizer):
        _refuse_unusable(part)


def _refuse_unusable(optimizer: Optimizer) -> None:
    kind: Any = type(optimizer)
    names = [k.__name__.lower() for k in kind.__mro__]
    for name in names:
        if name in REFUSED:
            raise ValueError(
                f"the optimizer {kind.__name__} cannot be used: {REFUSED[name]}; use AdamW"
            )
    if needed := needed_arguments(kind.step)[1:]:  # of the class: a scheduler wraps the object's
        raise ValueError(
            f"the optimizer {kind.__name__} is stepped with {', '.join(needed)}, which an update "
            "does not have (one that computes the loss again cannot be used): use AdamW, or give "
            "its step defaults"
        )


def coupled(optimizer: Optimizer) -> str:
    """Why no parameter of it may lie in pieces; nothing where they may, or it is not known."""
    return next(filter(None, map(_coupled, parts_of(optimizer))), "")


def _coupled(optimizer: Optimizer) -> str:
    kind = type(optimizer)
    for name in (k.__name__.lower() for k in kind.__mro__):
        if name in COUPLED:
            return (
                f"the optimizer {kind.__name__} cannot update pieces of a parameter: its update "
                f"needs {COUPLED[name]}"
            )
    if not elementwise(optimizer) and parts_differ(optimizer):
        return (
            f"the optimizer {kind.__name__} cannot update pieces of a parameter: of a small one "
            "it updates entries otherwise where it has a part of them alone"
        )
    return ""


def elementwise(optimizer: Optimizer) -> bool:
    known = [getattr(torch.optim, name) for name in ELEMENTWISE]
    kinds: list[Any] = [type(part) for part in parts_of(optimizer)]
    return all(any(issubclass(kind, k) and kind.step is k.step for k in known) for kind in kinds)


def hooked(optimizer: Optimizer) -> bool:
    """Whether a user's functions are called with its steps; a scheduler's are not among them."""
    of = [part.__dict__ for part in parts_of(optimizer)]
    own = any(x.get(f"_optimizer_step_{when}_hooks") for x in of for when in ("pre", "post"))
    replaced = (x["step"] for x in of if "step" in x)
    of_all = bool(_global_optimizer_pre_hooks or _global_optimizer_post_hooks)
    return own or of_all or not all(hasattr(x, "_wrapped_by_lr_sched") for x in replaced)


def takes_sparse(optimizer: Optimizer) -> bool:
    """Whether it may be given gradients of few rows of a parameter."""

    def takes(part: Optimizer) -> bool:
        kind: Any = type(part)
        settings = SPARSE.get(kind.__name__)
        known = settings is not None and kind is getattr(torch.optim, kind.__name__)
        return known and not any(g.get(s) for g in part.param_groups for s in settings or ())

    return all(map(takes, parts_of(optimizer)))


def needs_sparse(optimizer: Optimizer) -> bool:
    """Whether it takes no others."""
    return any(isinstance(part, torch.optim.SparseAdam) for part in parts_of(optimizer))


def trial_gradient(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
    """A small one, of the kind that it takes."""
    gradient = torch.full_like(parameter.detach(), 1e-3)
    return gradient.to_sparse(1) if needs_sparse(optimizer) else gradient


def step_aged(optimizer: Optimizer, age: int) -> None:
    """A step with learning rates over the age of its gradient, where that is above 1."""
    for part in parts_of(optimizer):
        # not of its own groups: a scheduler may set these meanwhile, from another thread
        aged = [{**g, "lr": g["lr"] / max(1, age)} for g in part.param_groups]
        with_groups(part, aged).step()


def with_groups(part: Optimizer, groups: list[dict[str, Any]]) -> Any:
    """One with these groups and else the same attributes, the state too."""
    other = copy.copy(part)
    other.__dict__ = {k: v for k, v in part.__dict__.items() if k != "step"}  # a scheduler's
    other.param_groups = groups
    return other


def parts_differ(optimizer: Optimizer) -> bool | None:
    """Whether three steps of an equal optimizer on each half of a small parameter, along either
    dimension, differ from those on all of it; None: it does not run there, or draws at random."""
    whole = torch.linspace(-1.0, 1.0, 24).view(6, 4)
    try:
        with torch.random.fork_rng(devices=[]):
            expected = _stepped(optimizer, [whole])
            if not torch.equal(expected, _stepped(optimizer, [whole])):
                return None
            for dim in (0, 1):
                parts = [_stepped(optimizer, [part]) for part in whole.chunk(2, dim)]
                if not torch.allclose(torch.cat(parts, dim), expected, rtol=1e-4, atol=1e-6):
                    return True
    except Exception:  # the user's code, on tensors that it was not written for
        return None
    return False


def _stepped(optimizer: Optimizer, values: Iterable[Tensor]) -> Tensor:
    """The only parameter after three steps; a gradient follows from its entry."""
    (p,) = parameters = [nn.Parameter(x.clone()) for x in values]
    twin = twin_of(optimizer, parameters)
    for group in twin.param_groups:
        if isinstance(group.get("lr"), (int, float)):
            group["lr"] = 0.1  # a warm-up may begin with 0
    for step in range(3):
        p.grad = torch.sin(5.0 * p.detach() + step)
        twin.step()
    return p.detach()


def twin_of(optimizer: Optimizer, parameters: Sequence[nn.Parameter]) -> Any:
    """One of the same class with the settings of the first group, independent of the original."""
    optimizer = parts_of(optimizer)[0]
    stays: dict[int, Any] = {id(p): p for g in optimizer.param_groups for p in g["params"]}
    stays[id(optimizer)] = optimizer

    def own(key: str, value: Any) -> Any:
        if key.startswith("_optimizer_") and key.endswith("_hooks"):
            return type(value)()  # the user's
        try:
            return copy.deepcopy(value, dict(stays))
        except Exception:  # what cannot be copied is hardly a number that a step changes
            return value

    # a scheduler puts a `step` of its own there, which steps the original
    left_out = ("step", "_opt_called", "param_groups", "state")
    twin = copy.copy(optimizer)
    twin.__dict__ = {k: own(k, v) for k, v in optimizer.__dict__.items() if k not in left_out}
    settings = {k: v for k, v in optimizer.param_groups[0].items() if k != "params"}
    twin.param_groups = [{**settings, "params": list(parameters)}]
    twin.state = defaultdict(dict)
    return twin
