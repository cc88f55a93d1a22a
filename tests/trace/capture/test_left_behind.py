"""What tracing leaves behind in a model, or in what its code keeps elsewhere: nothing."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.comparison import compare
from tests.plain import Case, exact

D = torch.float64


class Net(nn.Module):
    """`middle(model, h)` between its layers, with what that keeps."""

    def __init__(self, middle: Callable[["Net", Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 8), nn.Linear(8, 4)
        self.middle, self.keeper, self.ready = middle, Keeper(), False
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.middle(self, self.a(x).tanh()))  # type: ignore[no-any-return]


class Keeper:
    """An object of the user's own that keeps what it has made, in attributes and deeper."""

    def __init__(self) -> None:
        self.table: Tensor | None = None
        self.tables: dict[str, dict[int, Tensor]] = {"by": {}}
        self.hooked = False


def positions(h: Tensor) -> Tensor:
    return torch.arange(h.shape[1], dtype=h.dtype)


@functools.lru_cache
def remembered(count: int, dtype: torch.dtype) -> Tensor:
    return torch.arange(count, dtype=dtype)


def in_a_cache_of_functools(m: Net, h: Tensor) -> Tensor:
    return h + remembered(h.shape[1], h.dtype)


KEPT: dict[int, Tensor] = {}


def in_a_global(m: Net, h: Tensor) -> Tensor:
    if h.shape[1] not in KEPT:
        KEPT[h.shape[1]] = positions(h)
    return h + KEPT[h.shape[1]]


def in_an_object(m: Net, h: Tensor) -> Tensor:
    if m.keeper.table is None:
        m.keeper.table = positions(h)
    return h + m.keeper.table


def deep_in_an_object(m: Net, h: Tensor) -> Tensor:
    return h + m.keeper.tables["by"].setdefault(h.shape[1], positions(h))


def hooks_at_the_first_call(m: Net, h: Tensor) -> Tensor:
    """As `transformers` hooks layers whose outputs it is to give out."""
    if not m.ready:
        m.b.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        m.ready = True
    return h


def hooks_noted_by_an_object(m: Net, h: Tensor) -> Tensor:
    if not m.keeper.hooked:
        m.b.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
        m.keeper.hooked = True
    return h


def another_forward_of_a_layer(m: Net, h: Tensor) -> Tensor:
    if not m.ready:
        known = m.b.forward
        m.b.forward = lambda x: known(x * 1.5)  # type: ignore[method-assign]
        m.ready = True
    return h


KEEPING = [
    in_a_cache_of_functools, in_a_global, in_an_object, deep_in_an_object,
    hooks_at_the_first_call, hooks_noted_by_an_object, another_forward_of_a_layer,
]  # fmt: skip


def squares(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def rows(count: int, seed: int = 0) -> Tensor:
    return torch.randn(count, 6, generator=torch.Generator().manual_seed(seed), dtype=D)


@pytest.mark.parametrize("middle", KEEPING)
def test_a_traced_model_runs_as_before(middle: Any) -> None:
    remembered.cache_clear()
    KEPT.clear()
    plain = Net(middle)
    expected = [squares(plain, rows(5)).item() for _ in range(2)]
    remembered.cache_clear()
    KEPT.clear()
    model = Net(middle)
    step = trace(model, squares, rows(5), training=True)
    assert not step.opaque, step.reason
    assert compare(model, squares, rows(5), step).fault is None
    assert not model.b._forward_pre_hooks and "forward" not in vars(model.b) and not model.ready
    assert not model.keeper.hooked and model.keeper.table is None
    assert [squares(model, rows(5)).item() for _ in range(2)] == expected


@pytest.mark.parametrize("middle", [hooks_at_the_first_call, in_an_object])
def test_it_trains_as_a_plain_loop_does(middle: Any) -> None:
    case = Case(lambda: Net(middle), squares, [rows(n, n) for n in (6, 5, 1)])
    (found,) = exact(case, "single", 1)
    assert not found.opaque and not found.warned


class Refusing(nn.Module):
    """A model that cannot run under modes of torch's functions, with which traces are compared."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        if any(isinstance(m, TorchFunctionMode) and "NoDropout" in str(m) for m in modes()):
            raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")
        return self.layer(x)  # type: ignore[no-any-return]


def modes() -> list[Any]:
    return torch.overrides._get_current_function_mode_stack()


def test_what_only_our_own_runs_raise_is_told_as_our_fault() -> None:
    case = Case(Refusing, squares, [rows(n, n) for n in (6, 5)])
    (found,) = exact(case, "single", 1)
    assert "is a fault of Synchromesh" in found.opaque
    assert "test_left_behind.py" in found.opaque and "cannot be multiplied" in found.opaque
    assert sum("is a fault of Synchromesh" in text for text in found.warned) == 1


def test_what_the_model_raises_itself_is_its_own() -> None:
    def failing(model: nn.Module, batch: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(batch), torch.full((len(batch),), 9))

    with pytest.raises(IndexError, match="out of bounds"):
        exact(Case(Refusing, failing, [rows(6)]), "single", 1)
