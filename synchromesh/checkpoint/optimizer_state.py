"""The state of the user's optimizer: what lies like parameters, what is whole, and the rest.

shaped   one entry for each entry of the parameter (moments): lies and moves as it does
whole    tensors of other shapes (means of rows, of columns): complete where the parameter is
other    numbers (step counters), equal on all ranks: JSON"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from synchromesh.engine.optimizer import refuse_foreign
from synchromesh.programs.model import Model, dtype_name
from synchromesh.values.optimizer import kind_of, parts_of


class OptimizerState:
    def __init__(self, model: Model, optimizer: Optimizer) -> None:
        self.model, self.optimizer = model, optimizer
        self._own = False  # its state_dict is asked for by this
        of = ref(self)  # a trainer may be dropped

        def ask(*_: Any) -> None:
            if (state := of()) is not None:
                state._refuse_cut()

        for part in parts_of(optimizer):
            part.register_state_dict_pre_hook(ask)
            part.register_load_state_dict_pre_hook(ask)

    def _refuse_cut(self) -> None:
        if not self._own and not self.model.complete():
            raise RuntimeError(
                "the optimizer's state is cut over devices as the model is, so that its "
                "state_dict would be of this rank's part alone: trainer.save and trainer.resume "
                "keep it, for any number of ranks"
            )

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's own, of this rank's part."""
        self._own = True
        try:
            return self.optimizer.state_dict()
        finally:
            self._own = False

    def of(self, name: str) -> Mapping[str, Any]:
        """What the optimizer keeps of a parameter; nothing of what is no parameter."""
        parameter = self.model.parameters.get(name)
        if parameter is None or parameter not in self.optimizer.state:
            return {}
        state: Mapping[str, Any] = self.optimizer.state[parameter]
        return state

    def shaped(self, name: str) -> dict[str, Tensor]:
        """What has one entry for each entry of the parameter."""
        return {k: v for k, v in self._tensors(name) if v.shape == self.model.local(name).shape}

    def whole(self, name: str) -> dict[str, Tensor]:
        """What is neither that nor a number: equal on all ranks that have a part."""
        shape = self.model.local(name).shape
        return {k: v for k, v in self._tensors(name) if v.shape != shape and v.numel() != 1}

    def _tensors(self, name: str) -> list[tuple[str, Tensor]]:
        return [(k, v) for k, v in sorted(self.of(name).items()) if isinstance(v, Tensor)]

    def moving(self, name: str) -> dict[str, Tensor]:
        return self.shaped(name) | self.whole(name)

    def refuse_pieces(self, name: str) -> None:
        """ValueError for a parameter with whole state: what of it would belong to a shard?"""
        odd = next(iter(self.whole(name).items()), None)
        if odd is not None:
            raise ValueError(
                f"the optimizer {kind_of(self.optimizer)} keeps {odd[0]} of shape "
                f"{tuple(odd[1].shape)} for {name}, whose shape is another "
                f"{self.model.described[name].shape}: it cannot update pieces of it; use the plan "
                "'data', or AdamW"
            )

    def describe(self) -> dict[str, Any]:
        """All but the tensors that move, as JSON. ValueError for what has no form."""
        names: dict[Tensor, str] = {p: n for n, p in self.model.parameters.items()}
        refuse_foreign(self.optimizer, names)
        kind = kind_of(self.optimizer)
        groups = [
            {k: plain(v, f"optimizer group: {k}") for k, v in g.items() if k != "params"}
            | {"params": [names[p] for p in g["params"]]}
            for g in self.optimizer.param_groups
        ]
        state = {}
        for parameter, entries in self.optimizer.state.items():
            if parameter not in names:
                raise ValueError(
                    f"the optimizer {kind} keeps state of {str(parameter)[:40]!r}, which is no "
                    "parameter of the model and has no place in plans and checkpoints: keep it in "
                    "param_groups"
                )
            state[names[parameter]] = self.described(names[parameter], entries)
        return {"kind": kind, "groups": groups, "state": state}

    def described(self, name: str, entries: Mapping[str, Any]) -> dict[str, Any]:
        """The state of one parameter, but for the tensors that move."""
        shaped, whole = self.shaped(name), self.whole(name)
        other = {k: v for k, v in entries.items() if k not in shaped and k not in whole}
        return {
            "shaped": {k: dtype_name(v.dtype) for k, v in shaped.items()},
            "whole": {k: [dtype_name(v.dtype), list(v.shape)] for k, v in whole.items()},
            "other": {k: plain(v, f"{name}: {k}") for k, v in other.items()},
        }

    def adopt(self, described: Mapping[str, Any]) -> None:
        """Makes the optimizer's groups and counters what `described` says; tensors that move are
        zeros where they are new. ValueError for another optimizer's."""
        kind = kind_of(self.optimizer)
        if described["kind"] != kind:
            raise ValueError(
                f"it was saved with the optimizer {described['kind']}, this is {kind}: build "
                "it as the saved run did, or begin with its weights: prepare(..., weights=)"
            )
        self.adopt_groups(described["groups"])
        self.adopt_of(self.model.parameters, described["state"])

    def adopt_of(self, names: Iterable[str], described: Mapping[str, Any]) -> None:
        for name in names:
            parameter = self.model.parameters[name]
            if name not in described:
                self.optimizer.state.pop(parameter, None)
                continue
            state = self.optimizer.state[parameter]
            for key in [k for k in state if k not in described[name]["shaped"]]:
                del state[key]
            self.fill(name, described[name])

    def fill(self, name: str, entries: Mapping[str, Any]) -> None:
        """Numbers become those of `entries`, as `describe` has them; tensors that are not there
        become zeros."""
        parameter, known = self.model.parameters[name], self.moving(name)
        state = self.optimizer.state[parameter]
        for key, dtype in entries["shaped"].items():
            if key not in known:
                state[key] = torch.zeros_like(parameter, dtype=getattr(torch, dtype)).detach()
        for key, (dtype, shape) in entries["whole"].items():
            if key not in known:
                state[key] = parameter.new_zeros(shape, dtype=getattr(torch, dtype))
        device = self._counters_device(parameter)
        for key, value in entries["other"].items():
            state[key] = _unplain(value, device)

    def _counters_device(self, parameter: nn.Parameter) -> torch.device | None:
        """Where step counters lie: on the host, but for kernels that read them on the device."""
        for group in self.optimizer.param_groups:
            if any(parameter is p for p in group["params"]):
                on_device = group.get("fused") or group.get("capturable")
                return parameter.device if on_device else None
        return None

    @contextmanager
    def undone_on_error(self) -> Iterator[None]:
        """Leaves the optimizer as it was where the body fails."""
        groups = [dict(g) for g in self.optimizer.param_groups]
        state = {p: dict(entries) for p, entries in self.optimizer.state.items()}
        try:
            yield
        except BaseException:
            for group, old in zip(self.optimizer.param_groups, groups, strict=True):
                group.update(old)
            self.optimizer.state.clear()
            self.optimizer.state.update(state)
            raise

    def adopt_groups(self, groups: list[dict[str, Any]]) -> None:
        names = {p: n for n, p in self.model.parameters.items()}
        mine = [[names[p] for p in g["params"]] for g in self.optimizer.param_groups]
        if mine != [g["params"] for g in groups]:
            raise ValueError(
                f"the optimizer has other parameter groups ({[len(g) for g in mine]} parameters) "
                "than the "
                f"checkpoint ({[len(g['params']) for g in groups]}): build it as the saved run did"
            )
        for group, saved in zip(self.optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if key != "params":  # on the device and of the kind of the present one
                    old = group.get(key)
                    new = _unplain(value, old.device if isinstance(old, Tensor) else None)
                    group[key] = tuple(new) if isinstance(old, tuple) else new


def first_state(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> dict[str, Tensor]:
    """What the optimizer's constructor makes for one entry of `parameter`: it knows no values."""
    settings = {k: v for k, v in group.items() if k not in ("params", "initial_lr")}
    entry = nn.Parameter(torch.ones((1,) * parameter.dim(), dtype=parameter.dtype))
    of_group = (o for o in parts_of(optimizer) if any(g is group for g in o.param_groups))
    kind: Any = type(next(of_group))
    try:
        state: dict[str, Tensor] = dict(kind([entry], **settings).state[entry])
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the optimizer {kind.__name__} made its state while the model was on the meta "
            f"device, and cannot be made once more to find out its values ({error}): give it a "
            "model that is not on the meta device"
        ) from None
    return state


def plain(value: Any, where: str) -> Any:
    """A JSON form of a setting or a tensor of one number. ValueError for what has none."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"{where} is a tensor of shape {tuple(value.shape)}, which has no form in a "
                "checkpoint"
            )
        return {"tensor": value.item(), "dtype": dtype_name(value.dtype), "dims": value.dim()}
    if isinstance(value, (list, tuple)):
        return [plain(v, where) for v in value]
    if isinstance(value, Mapping):
        return {str(k): plain(v, f"{where}: {k}") for k, v in value.items()}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise ValueError(f"{where} is a {type(value).__name__}, which has no form in a checkpoint")


def _unplain(value: Any, device: torch.device | None) -> Any:
    """The inverse of `plain`, on the host where no device is given."""
    if isinstance(value, dict) and "tensor" in value:
        dtype = getattr(torch, value["dtype"])
        tensor = torch.tensor(value["tensor"], dtype=dtype, device=device)
        return tensor.reshape((1,) * value["dims"])
    if isinstance(value, dict):
        return {k: _unplain(v, device) for k, v in value.items()}
    return [_unplain(v, device) for v in value] if isinstance(value, list) else value
