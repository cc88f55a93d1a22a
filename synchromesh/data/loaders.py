"""The loaders of a trainer, each with its place in its data; checkpoints carry the places."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from synchromesh.data.cursor import Cursor
from synchromesh.data.fetch import Loading, LoadingOptions
from synchromesh.data.loader import Loader
from synchromesh.data.reading import Collate, OwnRows
from synchromesh.engine.groups import World


class Loaders:
    """One loader for each data set and order of rows, in the order in which they were asked for.

    own_rows(rows): the rows of a global batch that this rank works on. carries: whether a row of a
    batch goes on in the same row of the next one."""

    def __init__(self, own_rows: OwnRows, world: World, carries: bool = False) -> None:
        self._own_rows, self._world, self._carries = own_rows, world, carries
        self.place = ""  # of the batch that was handed out last
        self.begins = False  # whether that was the first one of an epoch, until it is trained on
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
        collate: Collate | None,
        options: LoadingOptions,
        continuing: bool = False,
    ) -> Loader:
        """The loader that was made before, else a new one. All ranks call alike. ValueError
        where settings or ranks differ, TypeError for an option that there is not."""
        if self._carries and shuffle:
            raise ValueError(
                "a carry goes from row i of a batch to row i of the next, and shuffled samples do "
                "not follow each other: give continuing=True in place of shuffle=True"
            )
        given = dict(options)
        given_collate: Any = given.pop("collate_fn", None)  # as torch calls it
        if collate is not None and given_collate is not None:
            raise ValueError("collate and collate_fn are the same: give one of them")
        collate, loading = collate or given_collate, Loading.of(given)
        for loader in self._made:
            if loader.dataset is dataset and loader.shuffle == shuffle:
                asked = {"batch_size": batch_size, "drop_last": drop_last or continuing}
                there = {"batch_size": loader.batch_size, "drop_last": loader.drop_last}
                asked |= {"seed": seed, "continuing": continuing}
                there |= {"seed": self._seeds[id(loader)], "continuing": loader.continuing}
                asked, there = {**asked, **vars(loading)}, {**there, **vars(loader.loading)}
                odd = [f"{k}={asked[k]} (was {there[k]})" for k in asked if asked[k] != there[k]]
                if odd:
                    raise ValueError(
                        "this data set has a loader already, with other settings: "
                        f"{', '.join(odd)}; set loader.batch_size on it, or wrap the data set for "
                        "a second order"
                    )
                return loader
        loader = Loader(
            dataset, batch_size, self._own_rows, Cursor(seed), shuffle, drop_last, collate,
            loading, self._world.everyone.all_gather_json, self._world.device, continuing,
        )  # fmt: skip
        if self._resumed:
            self._go_on(loader, self._resumed.pop(0))
        loader.handed_out = self._note
        self._made.append(loader)
        self._seeds[id(loader)] = seed
        return loader

    def _note(self, loader: Loader) -> None:
        self.place, self.begins = loader.place, loader.cursor.position == loader.rows

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[None]:
        """Inside, a loader of these begins its epoch anew; then it goes on where it was, for an
        evaluation moves no order of data."""
        begins, own = self.begins, isinstance(loader, Loader)
        cursor = loader.cursor if own else None
        if own:
            loader.cursor = loader.cursor.epoch_start()
        try:
            yield
        finally:
            self.begins = begins
            if own:
                loader.cursor = cursor

    def places(self) -> tuple[Cursor, ...]:
        """Every loader's place, as a checkpoint keeps it; all ranks call alike."""
        places = [replace(x.cursor, samples=x.samples).to_dict() for x in self._made]
        if any("stream" in place for place in places):
            # a rank has the states of those substreams alone that it reads
            of_ranks = self._world.everyone.all_gather_json(places)
            for index, place in enumerate(places):
                if "stream" in place:
                    tables = [rank[index]["stream"]["states"] for rank in of_ranks]
                    place["stream"]["states"] = [
                        [
                            next((c for c in cells if c is not None), None)
                            for cells in zip(*rows, strict=True)
                        ]
                        for rows in zip(*tables, strict=True)
                    ]
        return tuple(map(Cursor.from_dict, places))

    def go_on(self, places: Iterable[Cursor]) -> None:
        """Loaders go on from the places of a checkpoint; those to come take what is left."""
        self._resumed, self.begins = list(places), False
        for loader in self._made:
            if self._resumed:
                self._go_on(loader, self._resumed.pop(0))

    def _go_on(self, loader: Loader, place: Cursor) -> None:
        """The loader goes on at `place`; a warning where that was one in other data."""
        loader.cursor = replace(place, samples=None)
        if place.position and place.samples != loader.samples and not self._world.rank:
            warnings.warn(
                f"the run was saved behind sample {place.position} of a data set of "
                f"{place.samples}, this one has {loader.samples}: it has another order, so in the "
                f"rest of epoch {place.epoch + 1} samples may come twice or not at all (loaders "
                "are told apart by the order in which they are asked for)",
                stacklevel=2,
            )
