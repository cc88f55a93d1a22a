"""The stored profiles: a folder of files, each found by the key of what it was measured for.

    KEY.json    {format, written, circumstances, profile}

KEY is a hash of the format and of the profile key (`profiling/profile_key.py`, `circumstances` in
the file), so that a file of another version, model or machine is never read. The folder
is `synchromesh/profiles` in the user's cache folder, or what `SYNCHROMESH_CACHE` names; `off`
there: none. A file is complete or not there at all. Nothing here makes a run fail: it measures
instead, with a warning."""

import json
import os
import uuid
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

from synchromesh.values import document
from synchromesh.values.profile import Profile

VARIABLE = "SYNCHROMESH_CACHE"
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
            _warn(
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
            _warn(f"{why}; the profile is measured anew and the file replaced")
            return None

    def store(self, key: Mapping[str, Any], profile: Profile) -> None:
        """Keeps `profile` instead of what was kept for this key; a warning where it
        cannot be."""
        path = self.path(key)
        record = {
            "format": FORMAT,
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "circumstances": key,
            "profile": profile.to_dict(),
        }
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
            _warn(
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


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
