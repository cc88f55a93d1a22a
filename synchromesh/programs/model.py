"""The user's model in training: original names and shapes, this rank's shards, blocked calls."""

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, ClassVar
from weakref import WeakSet, ref

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from synchromesh.values.component import Parameter

_REQUIRES_GRAD = attrgetter("requires_grad")
LEFT = (
    "this model was left cut over devices by a trainer that is closed: take its weights by "
    "trainer.state_dict() or trainer.save before close, and build it anew"
)


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def describe(name: str, tensor: Tensor) -> Parameter:
    shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
    if isinstance(tensor, nn.Parameter):
        return Parameter(name, shape, dtype, tensor.requires_grad)
    return Parameter(name, shape, dtype, trainable=False, buffer=True)


def _running_statistics(module: nn.Module) -> Iterator[tuple[Tensor, bool]]:
    for norm in module.modules():
        if isinstance(norm, nn.modules.batchnorm._NormBase) and norm.track_running_stats:
            instance = isinstance(norm, nn.modules.instancenorm._InstanceNorm)
            both = (norm.running_mean, norm.running_var)
            yield from ((x, instance) for x in both if x is not None)


class Model:
    """A module with the global description of its tensors; shared tensors have their first name
    only. held: those that trainers hold now."""

    held: ClassVar[WeakSet["Model"]] = WeakSet()

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._shown = False  # inside of `open`
        self._left: list[bool] = []  # whether a closed trainer has left it cut
        self._guards: list[RemovableHandle] = []
        self._modules = tuple(module.modules())
        self._sizes = [(part._modules, len(part._modules)) for part in self._modules]
        forward = vars(module).get("forward")  # where it has another than its class
        self._own_forward = getattr(forward, "own", forward)  # a trainer may have been dropped
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.buffers: dict[str, Tensor] = dict(module.named_buffers())
        tensors = {**self.parameters, **self.buffers}
        self.described = {name: describe(name, tensor) for name, tensor in tensors.items()}
        names = {id(p): n for n, p in self.parameters.items()}
        names |= {id(b): n for n, b in self.buffers.items()}
        # module, attribute, name of a reference
        self.slots = [
            (part, key, names[id(tensor)])
            for part in self._modules
            for key, tensor in (*part._parameters.items(), *part._buffers.items())
            if tensor is not None
        ]
        self._references: Any = self._standing() or [[]] * 4
        self.persistent = frozenset(  # names that state_dict and checkpoints carry
            name for part, key, name in self.slots if key not in part._non_persistent_buffers_set
        )
        self.aliases: dict[str, str] = {
            n: names[id(t)] for n, t in module.state_dict(keep_vars=True).items() if id(t) in names
        }
        statistics = [(names[id(x)], instance) for x, instance in _running_statistics(module)]
        self.statistics = tuple(name for name, _ in statistics)  # of norms, of this rank's rows
        self.never_synchronised = tuple(name for name, instance in statistics if instance)

    def _standing(self) -> list[list[Any]]:
        """Tables of modules, keys in them, paths, and which objects stand there."""
        parameters = [
            (part._parameters, key, name, id(self.parameters[name]))
            for part, key, name in self.slots
            if name in self.parameters
        ]
        children = [
            (part._modules, key, f"{path}.{key}".lstrip("."), id(child))
            for path, part in self.module.named_modules()
            for key, child in part._modules.items()
        ]
        return [*map(list, zip(*parameters, *children, strict=True))]

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        """The modules of now, in order; a walk over all of them only where one was added."""
        if any(len(children) != size for children, size in self._sizes):
            return tuple(self.module.modules())
        return self._modules

    def paths(self) -> tuple[str, ...]:
        return tuple(path for path, _ in self.module.named_modules() if path)

    def inside(self, components: Iterable[str]) -> dict[str, tuple[str, ...]]:
        """The module paths inside each component, for patterns that name a module within."""
        paths = self.paths()
        return {name: tuple(p for p in paths if p.startswith(f"{name}.")) for name in components}

    def trained(self) -> tuple[bool, ...]:
        """Which parameters require gradients now; the user may freeze and release them. ValueError
        where another parameter or module is in the place of one that was prepared."""
        tables, keys, paths, known = self._references
        if (standing := [*map(id, map(dict.get, tables, keys))]) != known:
            if self._shown:
                raise ValueError("leave `with trainer.whole()` first: inside nothing is trained")
            pairs = zip(paths, standing, known, strict=True)
            name = next(path for path, a, b in pairs if a != b)
            raise ValueError(
                f"the model's {name} is another object than the one that was prepared: change "
                "values in place (`with torch.no_grad(): parameter.copy_(new)`), or close this "
                "trainer and prepare the model again"
            )
        return tuple(map(_REQUIRES_GRAD, self.parameters.values()))

    def describe_trained(self) -> None:
        """Notes which parameters require gradients now. ValueError for one that is new."""
        known = {id(p) for p in self.parameters.values()}
        if new := [n for n, p in self.module.named_parameters() if id(p) not in known]:
            raise ValueError(
                f"the model has parameters that it was prepared without: {', '.join(new[:3])}"
                f"{' ...' if len(new) > 3 else ''}; the optimizer and the plan know nothing of "
                "them: close this trainer and prepare the model again, with them in the optimizer"
            )
        for name, parameter in self.parameters.items():
            self.described[name] = replace(self.described[name], trainable=parameter.requires_grad)

    def complete(self) -> bool:
        return all(
            tuple(p.shape) == self.described[n].shape and not p.is_meta
            for n, p in self.parameters.items()
        )

    def local(self, name: str) -> Tensor:
        return self.parameters[name] if name in self.parameters else self.buffers[name]

    def place(self, name: str, tensor: Tensor) -> None:
        """Makes `tensor` this rank's shard; parameters stay the objects that others know."""
        parameter = self.parameters.get(name)
        if parameter is None:
            self.bind(name, tensor)
        elif parameter.is_meta:
            torch.utils.swap_tensors(parameter, nn.Parameter(tensor, parameter.requires_grad))
        else:
            if parameter.shape != tensor.shape:
                # a graph that the user keeps holds on to where gradients of the old shape go;
                # that is made anew only where the type changes
                other = torch.float32 if tensor.dtype is torch.float16 else torch.float16
                parameter.data = tensor.new_empty(0, dtype=other)
            parameter.data = tensor

    @contextmanager
    def unreferenced(self) -> Iterator[None]:
        """Without recurrent modules' weak references, with which torch swaps no tensors."""
        recurrent = [part for part in self._modules if isinstance(part, nn.RNNBase)]
        for part in recurrent:
            part._flat_weight_refs = []
        try:
            yield
        finally:
            for part in recurrent:
                weights = part._flat_weights
                part._flat_weight_refs = [None if w is None else ref(w) for w in weights]

    def bind(self, name: str, buffer: Tensor) -> None:
        """Lets every place of the module that holds buffer `name` refer to `buffer`."""
        for part, key, known in self.slots:
            if known == name:
                setattr(part, key, buffer)
        self.buffers[name] = buffer

    def adopt_assigned(self) -> None:
        """Takes over buffers that the module's own code has assigned anew (`self.n = self.n + 1`).
        ValueError for one of another shape or type: it has a place in checkpoints and plans."""
        for part, key, name in self.slots:
            table = part._buffers
            if key not in table or table[key] is self.buffers[name]:
                continue
            new, known = table[key], self.buffers[name]
            if new is None or (new.shape, new.dtype) != (known.shape, known.dtype):
                given = "None" if new is None else f"{list(new.shape)} of {dtype_name(new.dtype)}"
                raise ValueError(
                    f"the model assigned {given} to its buffer {name}, which is "
                    f"{list(known.shape)} of {dtype_name(known.dtype)}: buffers keep their shape "
                    "and type in training"
                )
            self.bind(name, new.detach())

    @contextmanager
    def unsharded(
        self, device: torch.device, buffers: Mapping[str, Tensor] | None = None
    ) -> Iterator[nn.Module]:
        """The module with global shapes, on the meta device if sharded here; or with `buffers`."""
        with self.replaced(dict(self._full(device, buffers or {}))) as module:
            yield module

    @contextmanager
    def replaced(self, tensors: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """The module with other tensors of those names, callable inside."""
        kept = [
            (part, key, getattr(part, key)) for part, key, name in self.slots if name in tensors
        ]
        try:
            for part, key, name in self.slots:
                if name in tensors:
                    setattr(part, key, tensors[name])
            with self.open() as module:
                yield module
        finally:
            for part, key, tensor in kept:
                setattr(part, key, tensor)

    @contextmanager
    def whole(self, entire: Mapping[str, Tensor]) -> Iterator[nn.Module]:
        """The module with entire tensors, copies, callable inside. RuntimeError where a parameter
        was changed."""

        def apart(name: str) -> Tensor:
            tensor, here = entire[name].detach(), self.local(name).untyped_storage().data_ptr()
            return tensor.clone() if tensor.untyped_storage().data_ptr() == here else tensor

        tensors = {
            name: nn.Parameter(apart(name), d.trainable)
            if name in self.parameters
            else apart(name)
            for name, d in self.described.items()
        }
        versions = {name: tensors[name]._version for name in self.parameters}
        with self.replaced(tensors) as module:
            yield module
        if changed := [n for n, version in versions.items() if tensors[n]._version != version]:
            raise RuntimeError(
                f"the model's {changed[0]} was changed inside `with trainer.whole()`, which shows "
                "values and takes none back: change parameters outside of it, or resume a "
                "checkpoint"
            )

    def _full(
        self, device: torch.device, buffers: Mapping[str, Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        for name, d in self.described.items():
            local = self.local(name)
            if tuple(local.shape) == d.shape and local.device == device:
                continue
            if name in buffers:
                yield name, buffers[name].to(device)
                continue
            empty = torch.empty(d.shape, dtype=local.dtype, device="meta")
            is_parameter = name in self.parameters
            yield name, nn.Parameter(empty, d.trainable) if is_parameter else empty

    @contextmanager
    def open(self) -> Iterator[nn.Module]:
        """The module with this rank's tensors, callable inside."""
        outer, self._shown = self._shown, True
        self.unblock()
        try:
            yield self.module
        finally:
            self._shown = outer
            if not outer:
                self.block()

    def block(self) -> None:
        """Makes a direct call of the module an error that says what to call; and its state_dict,
        copies and loading where this rank has a part of it alone."""
        of, left = ref(self), self._left  # a trainer may be dropped

        def refuse(*_: Any, **__: Any) -> Any:
            model = of()
            close = model is not None and model.complete()
            raise RuntimeError(
                LEFT
                if left
                else "this model is held by Synchromesh, which may have cut it over several "
                "devices: call trainer.step(batch) to train, trainer.evaluate(loader, metric) to "
                "evaluate, trainer.state_dict() for its weights, `with trainer.whole() as module` "
                f"for a plain module{', or trainer.close() to give it back' if close else ''}"
            )

        refuse.own = self._own_forward  # type: ignore[attr-defined]
        self.module.__dict__["forward"] = self.module.__dict__["__reduce_ex__"] = refuse
        self.module.__dict__["__deepcopy__"] = _copying(self)
        self._guards = self._guards or _guard(self)
        self.held.add(self)

    def unblock(self) -> None:
        self.held.discard(self)
        for name in ("forward", "__reduce_ex__", "__deepcopy__"):
            self.module.__dict__.pop(name, None)
        if self._own_forward is not None:
            self.module.__dict__["forward"] = self._own_forward

    def release(self) -> None:
        """Gives the module back, for good; a cut one goes on refusing."""
        if not self.complete():
            self._left.append(True)
            self.held.discard(self)
            return
        self.unblock()
        for handle in self._guards:
            handle.remove()

    def refuse_cut(self, what: str) -> None:
        """RuntimeError where this rank has a part of the tensors alone."""
        if not self._shown and not self.complete():
            raise RuntimeError(
                LEFT
                if self._left
                else f"this model is cut over devices, so that {what} would be of this rank's "
                "part alone: call trainer.state_dict() on all ranks for complete tensors, "
                "trainer.export(path) for a file, trainer.resume or prepare(weights=...) to load, "
                "or use the module inside `with trainer.whole() as module`"
            )


def refuse_held(module: nn.Module, caller: str) -> None:
    """ValueError where a trainer holds the module now."""
    if any(held.module is module for held in Model.held):
        raise ValueError(
            f"{caller}: the model is held by a trainer, which may have cut it over devices: call "
            "it before prepare, inside `with trainer.whole() as module`, or after trainer.close()"
        )


@dataclass(frozen=True)
class _Guard:
    """A hook that asks first; what is copied or unpickled with a module asks nobody."""

    what: str
    model: Callable[[], Model | None] = lambda: None
    parts: Container[int] = ()

    def __call__(self, part: nn.Module, *_: Any) -> None:
        if (model := self.model()) is not None and id(part) in self.parts:
            model.refuse_cut(self.what)

    def __reduce__(self) -> Any:
        return _Guard, (self.what,)


def _guard(model: Model) -> list[RemovableHandle]:
    """Lets state_dict and load_state_dict of the module and its parts ask first."""
    parts = {id(part) for part in model.module.modules()}
    asks = _Guard("its state_dict", ref(model), parts)
    loads = _Guard("what load_state_dict sets", ref(model), parts)
    return [
        handle
        for part in model.module.modules()
        for handle in (
            part.register_state_dict_pre_hook(asks),
            part.register_load_state_dict_pre_hook(loads),
        )
    ]


def _copying(model: Model) -> Callable[[Any], nn.Module]:
    of = ref(model)

    def deepcopy(memo: Any) -> nn.Module:
        guarded = of()
        assert guarded is not None
        guarded.refuse_cut("a copy (of AveragedModel, for example)")
        with guarded.open() as module:
            copied: nn.Module = copy.deepcopy(module, memo)
        return copied

    return deepcopy
