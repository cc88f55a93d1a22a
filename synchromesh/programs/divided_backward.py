"""A backward in two parts: the gradients of what a stage was given, and later those of weights.

    forward    x ----> [ x w1 ] ----> gelu ----> [ x w2 ] ----> y        [ ] products
    inputs     dx <--- [ d w1 ] <---- gelu <---- [ d w2 ] <---- dy       keep their x and d
    weights           w1 += d x                 w2 += d x

(Zero bubble, Qi et al. 2023, arXiv 2401.10241.) The operators of a divided graph
(`trace/partition/division.py`) are given their weights detached, so that a backward comes to no
parameter. A product keeps its input and its result's gradient; other operators leave their
weights' gradients on what stands for the weights. The second part is one backward from both, in
which each parameter's gradient is complete once, products are made from the last to the first, and
what a weight was made with (moves over the tensor ranks) runs once, in an order that is the same
on all ranks."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Gradients = tuple[Tensor | None, ...]
_FUNCTIONS: Any = torch._C._VariableFunctions


class Product(NamedTuple):
    """An operator of an input, a weight, a bias or None, and what else it is told.

    input, weights: its gradients, from that of its result and from what it was given, `input` of
    the input, `weights` of weight and bias, which it reads the shapes of alone."""

    operator: Callable[..., Tensor]
    input: Callable[..., Tensor | None]
    weights: Callable[..., Gradients]


def _linear_weights(d: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> Gradients:
    rows = d.reshape(-1, d.shape[-1])
    return rows.t().mm(x.reshape(-1, x.shape[-1])), None if bias is None else rows.sum(0)


def _addmm_weights(d: Tensor, x: Tensor, weight: Tensor, bias: Tensor) -> Gradients:
    return x.t().mm(d), d.sum_to_size(bias.shape)


def _embedding_weights(
    d: Tensor, x: Tensor, weight: Tensor, bias: None, padding: int, by_frequency: bool
) -> Gradients:
    words = weight.shape[0]
    own = torch.ops.aten.embedding_dense_backward(d, x, words, padding, by_frequency)
    return own, None


def _convolution_backward(
    wanted: tuple[bool, bool], d: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None,
    *told: Any,
) -> Gradients:  # fmt: skip
    *strides, groups = told
    sizes, mask = bias if bias is None else bias.shape, [*wanted, wanted[1] and bias is not None]
    found: Gradients = torch.ops.aten.convolution_backward(
        d, x, weight, sizes, *strides, False, [0] * len(strides[0]), groups, mask
    )
    return found


def _convolution(operator: Callable[..., Tensor]) -> Product:
    return Product(
        operator,
        lambda *given: _convolution_backward((True, False), *given)[0],
        lambda *given: _convolution_backward((False, True), *given)[1:],
    )


PRODUCTS: Mapping[str, Product] = {  # by the names of `trace.partition.division.PRODUCTS`
    "linear": Product(torch._C._nn.linear, lambda d, _, w, *__: d.matmul(w), _linear_weights),
    "addmm": Product(
        lambda x, w, b: torch.addmm(b, x, w), lambda d, _, w, *__: d.mm(w.t()), _addmm_weights
    ),
    "embedding": Product(
        lambda x, w, _, *told: _FUNCTIONS.embedding(w, x, *told), lambda *_: None,
        _embedding_weights,
    ),
    **{name: _convolution(getattr(_FUNCTIONS, name)) for name in ("conv1d", "conv2d", "conv3d")},
}  # fmt: skip


class _Waiting:
    """A product whose weight and bias get their gradients later. make: their gradients, once the
    first part has come to it."""

    def __init__(self, *weights: Tensor | None) -> None:
        self.weights = weights
        self.make: Callable[[], Gradients] | None = None


class DividedBackward:
    """What the operators of one forward leave for the second part of its backward."""

    def __init__(self) -> None:
        # what makes a result need a gradient whose input needs none
        self._anchor = torch.empty(0, requires_grad=True)
        self._products: list[_Waiting] = []
        self._joined: list[tuple[Tensor, Tensor]] = []  # weights, and what stands for them

    def product(self, name: str, x: Tensor, *given: Any) -> Tensor:
        """The result of a product."""
        weight, bias, *told = given
        if not any(w is not None and w.requires_grad for w in (weight, bias)):
            return PRODUCTS[name].operator(x, *given)
        if weight.is_complex():  # the formulas above have no conjugates
            joined = (w if w is None else self.joined(w) for w in (weight, bias))
            return PRODUCTS[name].operator(x, *joined, *told)
        waiting = _Waiting(weight, bias)
        self._products.append(waiting)
        detached = (w if w is None else w.detach() for w in (weight, bias))
        result: Tensor = _Product.apply(waiting, name, self._anchor, x, *detached, *told)
        return result

    def joined(self, weight: Tensor) -> Tensor:
        """What stands for a weight in an operator that makes all its gradients at once."""
        if not weight.requires_grad:
            return weight
        stand_in = weight.detach().requires_grad_()
        self._joined.append((weight, stand_in))
        return stand_in

    def weights(self) -> None:
        """The second part, once the first is over."""
        made = [_Later.apply(w, *w.weights) for w in self._products if w.make is not None]
        roots = [(later, later.detach()) for later in made]
        roots += [(w, s.grad) for w, s in self._joined if s.grad is not None]
        self._products, self._joined = [], []
        del made
        if roots:
            places, gradients = zip(*roots, strict=True)
            del roots
            torch.autograd.backward(places, gradients)


class _Product(torch.autograd.Function):
    """A product whose backward makes its input's gradient alone."""

    @staticmethod
    def forward(
        ctx: Any, waiting: _Waiting, name: str, anchor: Tensor, x: Tensor, weight: Tensor,
        bias: Tensor | None, *told: Any,
    ) -> Tensor:  # fmt: skip
        ctx.waiting, ctx.name, ctx.told = waiting, name, told
        ctx.save_for_backward(x, weight, bias)
        return PRODUCTS[name].operator(x, weight, bias, *told)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d: Tensor) -> Any:
        product, given = PRODUCTS[ctx.name], (*ctx.saved_tensors, *ctx.told)
        ctx.waiting.make = lambda: product.weights(d, *given)
        own = product.input(d, *given) if ctx.needs_input_grad[3] else None
        return None, None, None, own, None, None, *(None for _ in ctx.told)


class _Later(torch.autograd.Function):
    """Nothing, whose backward gives a product's weight and bias their gradients."""

    @staticmethod
    def forward(ctx: Any, waiting: _Waiting, *weights: Tensor | None) -> Tensor:
        ctx.waiting = waiting
        return next(w for w in weights if w is not None).new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _: Tensor) -> Any:
        waiting, ctx.waiting = ctx.waiting, None
        assert waiting.make is not None
        return None, *waiting.make()
