"""The stored profiles: a folder of files, each found by the key of what it was measured for.

    KEY.json    {format, written, circumstances, profile}

KEY is a hash of the format and of the profile key (`profile_key`, `circumstances` in the file), so
that a file of another version, model or machine is never read. The folder is
`synchromesh/profiles` in the user's cache folder, or what `SYNCHROMESH_CACHE` names (`off`: none).
A file is complete or not there at all. No failure here stops a run: it measures, with a warning.

The key is what a profile's numbers depend on, as far as it is known unmeasured. A profile is of
use again where all of it is equal: the model (its programs and how they hang together), rows of a
batch, the optimizer, versions, and every rank's device, cores, threads and neighbours. How fast
links and devices are today is no part of it: that is sampled."""

import json
import os
import platform
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from synchromesh.launcher.machine import LAB, cores, place, processor
from synchromesh.profiling.live_facts import LiveFacts
from synchromesh.values import document
from synchromesh.values.caution import caution
from synchromesh.values.layout_spec import LayoutSpec
from synchromesh.values.optimizer import parts_of
from synchromesh.values.plan import Plan
from synchromesh.values.profile import Profile
from synchromesh.values.version import VERSION

VARIABLE = "SYNCHROMESH_CACHE"
FREE = ("params", "lr", "initial_lr")  # settings that no cost of an optimizer depends on
ProfileKey = dict[str, Any]
FORMAT = 2  # to be raised with every change of what a profile holds or how it is measured


@dataclass(frozen=True)
class StoredProfile:
    """A profile as it was stored, and when: UTC, as ISO 8601 has it."""

    profile: Profile
    written: str

    @property
    def day(self) -> str:
        return self.written[:10]


class ProfileFolder:
    """The profiles in `folder`, which need not exist."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def open(cls) -> "ProfileFolder | None":
        """The one that the environment names; None where it is off or no folder is known."""
        named = os.environ.get(VARIABLE, "")
        if named == "off":
            return None
        if named:
            return cls(Path(os.path.abspath(os.path.expanduser(named))))
        base = os.environ.get("XDG_CACHE_HOME", "")
        if not os.path.isabs(base):  # others are to be ignored, says the specification
            base = os.path.expanduser("~/.cache")
        if not os.path.isabs(base):
            caution(
                "profiles are not kept: this user has no home folder; "
                f"{VARIABLE} may name one, or be `off`"
            )
            return None
        return cls(Path(base) / "synchromesh" / "profiles")

    def path(self, key: Mapping[str, Any]) -> Path:
        text = json.dumps([FORMAT, key], sort_keys=True)
        return self.folder / f"{blake2b(text.encode(), digest_size=16).hexdigest()}.json"

    def find(self, key: Mapping[str, Any]) -> StoredProfile | None:
        """What was measured for this key; None, with a warning, where it is damaged."""
        path = self.path(key)
        if not os.path.exists(path):
            return None
        try:
            return _read(path, key)
        except Exception as error:  # whatever it is: other ranks wait for what this one finds
            why = str(error) or type(error).__name__
            caution(f"{why}; the profile is measured anew and the file replaced")
            return None

    def store(self, key: Mapping[str, Any], profile: Profile) -> None:
        """Keeps `profile` for this key; a warning where it cannot be kept."""
        path = self.path(key)
        record = {
            "format": FORMAT, "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "circumstances": key, "profile": profile.to_dict(),
        }  # fmt: skip
        draft = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            text = json.dumps(record, allow_nan=False)
            if len(text) > document.MAX_BYTES:
                raise ValueError(f"{len(text)} bytes are more than the {document.MAX_BYTES} read")
            self.folder.mkdir(parents=True, exist_ok=True)
            draft.write_text(text, encoding="utf-8")
            draft.replace(path)
        except (OSError, ValueError) as error:
            with suppress(OSError):
                draft.unlink()
            why = (isinstance(error, OSError) and error.strerror) or str(error)
            caution(
                f"{path}: the profile cannot be kept ({why}), so the next run measures again; "
                f"{VARIABLE} may name another folder, or be `off`"
            )


def _read(path: Path, key: Mapping[str, Any]) -> StoredProfile:
    keys = ("format", "written", "circumstances", "profile")
    item = document.mapping(document.read(path), str(path), keys, keys)
    if item["format"] != FORMAT or item["circumstances"] != key:
        raise ValueError(f"{path}: is of another version, or was measured in other circumstances")
    profile = Profile.from_dict(item["profile"], f"{path}: profile")
    counts = {len(side) for c in profile.compute.values() for side in (c.forward, c.backward)}
    if len(counts) > 1:
        raise ValueError(f"{path}: profile: programs have curves of {sorted(counts)} ranks")
    return StoredProfile(profile, document.text(item["written"], f"{path}: written"))


def profile_key(facts: LiveFacts, ranks: Sequence[int]) -> ProfileKey:
    """That of a profile that is measured on `ranks`, as JSON has it; all ranks call alike."""
    world = facts.world
    table = world.everyone.all_gather_json(of_rank(world.device))
    return {**of_ranks(table, ranks), "backend": world.backend, **of_problem(facts)}


def of_rank(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if cuda else processor(), "cores": cores(),
        "threads": torch.get_num_threads(), "torch": torch.__version__,
        "python": platform.python_version(), "synchromesh": VERSION,
        "emulated": bool(os.environ.get(LAB)), "place": place(),
    }  # fmt: skip


def of_ranks(table: Sequence[Mapping[str, Any]], ranks: Sequence[int]) -> dict[str, Any]:
    """What all ranks of the run have, and which share a host: numbers of hosts, not their names,
    since another night's machines may be as good."""
    places = list(dict.fromkeys(row["place"] for row in table))
    return {
        "ranks": [{k: v for k, v in row.items() if k != "place"} for row in table],
        "hosts": [places.index(row["place"]) for row in table], "taking_part": list(ranks),
    }  # fmt: skip


def of_problem(facts: LiveFacts) -> dict[str, Any]:
    """The model, its batch and its optimizer."""
    unsharded = facts.partitions.partition(Plan(LayoutSpec("data")))
    programs = [local.program for local in unsharded.components]
    wiring = repr((programs, facts.problem.step.chain))
    batch = [x for x in pytree.tree_leaves(facts.example) if isinstance(x, Tensor)]
    return {
        "model": blake2b(wiring.encode(), digest_size=16).hexdigest(), "rows": facts.problem.rows,
        "strides": [_strided(facts.tensors.values()), _strided(batch)],
        "optimizer": of_optimizer(facts.optimizer),
    }  # fmt: skip


def of_optimizer(optimizer: Optimizer) -> dict[str, Any]:
    """What `programs/optimizer.py` goes by: class and settings of the first group; of numbers only
    whether they are zero, which leaves out operators."""
    group = optimizer.param_groups[0]
    kind = type(parts_of(optimizer)[0])
    return {
        "class": f"{kind.__module__}.{kind.__qualname__}",
        "dtype": str(group["params"][0].dtype),
        "settings": {k: _setting(v) for k, v in sorted(group.items()) if k not in FREE},
    }


def _setting(value: Any) -> Any:
    if value is None or isinstance(value, bool | str):
        return value
    return value != 0 if isinstance(value, int | float) else type(value).__name__


def _strided(tensors: Any) -> bool:
    """Whether some lie otherwise than row after row, as in `channels_last`."""
    return any(not x.is_contiguous() for x in tensors)
