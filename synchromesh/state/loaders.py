"""The loaders of a trainer, each with its place in its data; checkpoints carry the places."""

from collections.abc import Callable, Iterable
from typing import Any

from synchromesh.state.cursor import Cursor, Loader


class Loaders:
    """One loader for each data set and order of rows, in the order in which they were asked for.

    row_range(rows): [start, stop) of a global batch that this rank works on.
    """

    def __init__(self, row_range: Callable[[int], tuple[int, int]]) -> None:
        self._row_range = row_range
        self._made: list[Loader] = []
        self._seeds: dict[int, int] = {}  # as they were asked for
        self._resumed: list[Cursor] = []  # of a checkpoint, for loaders to come

    def one(
        self,
        dataset: Any,
        batch_size: int,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate: Callable[[list[Any]], Any] | None,
        num_workers: int,
        timeout: float,
    ) -> Loader:
        """The loader that was made before, else a new one; ValueError where settings differ."""
        asked = {"batch_size": batch_size, "drop_last": drop_last, "num_workers": num_workers}
        for loader in self._made:
            if loader.dataset is dataset and loader.shuffle == shuffle:
                asked["seed"] = seed
                there = {k: getattr(loader, k) for k in asked if k != "seed"}
                there["seed"] = self._seeds[id(loader)]
                odd = [f"{k}={asked[k]} (was {there[k]})" for k in asked if asked[k] != there[k]]
                if odd:
                    raise ValueError(
                        "this data set has a loader already, with other settings: "
                        f"{', '.join(odd)}; set loader.batch_size on it, or wrap the data set for "
                        "a second order"
                    )
                return loader
        cursor = self._resumed.pop(0) if self._resumed else Cursor(seed)
        loader = Loader(
            dataset, batch_size, self._row_range, cursor, shuffle, drop_last, collate,
            num_workers, timeout,
        )  # fmt: skip
        self._made.append(loader)
        self._seeds[id(loader)] = seed
        return loader

    def to_list(self) -> list[Any]:
        """Every loader's place, as a checkpoint keeps it."""
        return [loader.cursor.to_dict() for loader in self._made]

    def go_on(self, places: Iterable[Any]) -> None:
        """Loaders go on from the places of a checkpoint; those to come take what is left."""
        self._resumed = [Cursor.from_dict(place) for place in places]
        for loader in self._made:
            if self._resumed:
                loader.cursor = self._resumed.pop(0)
