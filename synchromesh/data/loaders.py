"""All loaders of a trainer: one for each data set and order, whose places a checkpoint keeps."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch.utils.data import DataLoader

from synchromesh.data.cursor import Cursor
from synchromesh.data.fetch import Loading, LoadingOptions
from synchromesh.data.loader import Batching, Loader
from synchromesh.data.padding import Padding
from synchromesh.data.reading import OwnRows
from synchromesh.data.torch_loader import TorchLoader
from synchromesh.engine.world import World
from synchromesh.values.caution import caution

LOOKED_AT = 256  # of so many updates one looks whether ranks have equal rows; chosen


class Loaders:
    """One for each data set and order of rows, as they were asked for. own_rows(rows): of a global
    batch, this rank's. carries: whether a row goes on in the same row of the next batch."""

    def __init__(
        self, own_rows: OwnRows, world: World, carries: bool = False, model: Any = None
    ) -> None:
        self._own_rows, self._world, self._carries = own_rows, world, carries
        config = getattr(model, "config", None)  # of transformers
        self._longest: int | None = getattr(config, "max_position_embeddings", None)
        self.place = ""  # of the batch that was handed out last
        self.begins = False  # whether that was the first one of an epoch, until it is trained on
        self.gave = 0  # batches to come that were chosen here, or by `Trainer.shard`
        # called with each batch that is handed out, and what reads it again: None for a stream
        self.handed: Callable[[Any, Callable[[], Any] | None], object] = lambda *_: None
        self.guard: Callable[[Callable[[], Any]], Any] = lambda call: call()  # of agreements
        self._made: dict[Loader, int] = {}  # with the seeds that were asked for
        self._resumed: list[Cursor] = []  # of a checkpoint, for loaders to come
        self.committed: tuple[Cursor, ...] = ()  # every loader's place behind the last update

    def unknown(self, steps: int) -> bool:
        """Whether it is to be looked at after so many updates whether ranks have equal rows, as
        those of a plain DataLoader are."""
        given, self.gave = self.gave, max(0, self.gave - 1)
        return not given and steps % LOOKED_AT == 0

    def asked(
        self, dataset: Any, batch_size: int | None, batching: Batching, seed: int,
        options: Mapping[str, Any],
    ) -> Loader:  # fmt: skip
        """As `one`, or of a torch loader, which says what is else asked for itself: ValueError
        where that is said a second time, or where it reads in another way."""
        if not isinstance(dataset, DataLoader):
            if batch_size is None:
                raise ValueError("loader: give batch_size, the rows of a batch over all ranks")
            return self.one(dataset, batch_size, batching, seed, options)
        added = {name: options[name] for name in options if name in ("pad", "lengths")}
        Loading.of(dict.fromkeys(options.keys() - LoadingOptions.__annotations__.keys()))
        known = {"continuing": False} | dict.fromkeys(added)
        said = {"batch_size": batch_size, **vars(batching), **options, **known}
        if twice := [name for name, value in said.items() if value]:
            raise ValueError(
                f"loader: the DataLoader says {', '.join(twice)} itself: give it alone, or its "
                "data set in its place"
            )
        words = TorchLoader(dataset)
        batching = Batching(
            words.shuffle, words.batches.drop_last, dataset.collate_fn, batching.continuing,
            words.sampler,
        )  # fmt: skip
        seed = seed if words.seed is None else words.seed
        options = {**words.options, **added}
        return self.one(dataset.dataset, words.batches.batch_size, batching, seed, options)

    def one(
        self, dataset: Any, batch_size: int, batching: Batching, seed: int,
        options: Mapping[str, Any],
    ) -> Loader:  # fmt: skip
        """The loader that was made before, else a new one. All ranks call alike. ValueError
        where settings or ranks differ, TypeError for an option that there is not."""
        if self._carries and batching.shuffle:
            raise ValueError(
                "a carry goes from row i of a batch to row i of the next, and shuffled samples do "
                "not follow each other: give continuing=True in place of shuffle=True"
            )
        batching, loading = _loading_of(batching, options, self._longest)
        asked = _settings(batch_size, batching, seed, loading)
        for loader, its_seed in self._made.items():
            if loader.dataset is dataset and loader.batching.reads_as(batching):
                _refuse_other(loader, its_seed, asked)
                return loader
        loader = Loader(
            dataset, batch_size, self._own_rows, Cursor(seed), batching, loading,
            lambda x: self.guard(lambda: self._world.everyone.all_gather_json(x)),
            self._world.device,
        )  # fmt: skip
        if self._resumed:
            self._go_on(loader, self._resumed.pop(0))
        loader.handed_out, loader.ended = self._note, self.commit
        self._made[loader] = seed
        self.commit()
        return loader

    @property
    def streams(self) -> bool:
        """Whether one reads a stream."""
        return any(loader.stream for loader in self._made)

    def _note(self, loader: Loader, batch: Any, again: Callable[[], Any]) -> None:
        self.place, self.begins = loader.place, loader.cursor.position == loader.rows
        self.gave += 1
        self.handed(batch, None if loader.stream else again)

    @contextmanager
    def evaluating(self, loader: Any) -> Iterator[None]:
        """Inside, one of these loaders begins its epoch anew; then it goes on where it was."""
        begins, gave, own = self.begins, self.gave, isinstance(loader, Loader)
        cursor = loader.cursor if own else None
        if own:
            loader.cursor = replace(loader.cursor, position=0, stream=None)
        try:
            yield
        finally:
            self.begins, self.gave = begins, gave
            if own:
                loader.cursor = cursor
            self.commit()

    def commit(self) -> None:
        """What was handed out is done with."""
        self.committed = tuple(loader.said for loader in self._made)

    def places(self) -> tuple[Cursor, ...]:
        """Every loader's place, as a checkpoint keeps it; all ranks call alike."""
        places = [x.said.to_dict() for x in self._made]
        if any("stream" in place for place in places):
            # a rank has the states of those substreams alone that it reads
            of_ranks = self._world.everyone.all_gather_json(places)
            for index, place in enumerate(places):
                if "stream" in place:
                    tables = [rank[index]["stream"]["states"] for rank in of_ranks]
                    place["stream"]["states"] = _known_states(tables)
        return tuple(map(Cursor.from_dict, places))

    def go_on(self, places: Iterable[Cursor]) -> None:
        """Loaders go on from the places of a checkpoint; those to come take what is left."""
        self._resumed, self.begins, self.gave = list(places), False, 0
        for loader in self._made:
            if self._resumed:
                self._go_on(loader, self._resumed.pop(0))
        self.commit()

    def _go_on(self, loader: Loader, place: Cursor) -> None:
        """The loader goes on at `place`; a warning where that was one in other data."""
        loader.cursor = replace(place, samples=None)
        if loader.chosen and place.batch_size is not None:
            loader.batch_size = place.batch_size
        if place.position and place.samples != loader.samples and not self._world.rank:
            caution(
                f"the run was saved behind sample {place.position} of a data set of "
                f"{place.samples}, this one has {loader.samples}: it has another order, so in the "
                f"rest of epoch {place.epoch + 1} samples may come twice or not at all (loaders "
                "are told apart by the order in which they are asked for)"
            )


def _loading_of(
    batching: Batching, options: Mapping[str, Any], longest: int | None
) -> tuple[Batching, Loading]:
    """`options` without those of the batching: what torch calls `collate`, and the padding."""
    given = dict(options)
    collate: Any = given.pop("collate_fn", None)
    if batching.collate is not None and collate is not None:
        raise ValueError("collate and collate_fn are the same: give one of them")
    collate = batching.collate or collate
    padding = Padding.of(collate, given.pop("pad", None), given.pop("lengths", ()), longest)
    return replace(batching, collate=collate, padding=padding), Loading.of(given)


def _settings(batch_size: int, batching: Batching, seed: int, loading: Loading) -> dict[str, Any]:
    """What a second call for a data set may not change, by the names of arguments."""
    own = {"batch_size": batch_size, "drop_last": batching.whole, "seed": seed}
    return {**own, "continuing": batching.continuing, "pad": batching.padding, **vars(loading)}


def _refuse_other(loader: Loader, seed: int, asked: Mapping[str, Any]) -> None:
    """ValueError where the loader was made with other settings than are asked for."""
    there = _settings(loader.batch_size, loader.batching, seed, loader.loading)
    if odd := [f"{k}={asked[k]} (was {there[k]})" for k in asked if asked[k] != there[k]]:
        raise ValueError(
            f"this data set has a loader already, with other settings: {', '.join(odd)}; set "
            "loader.batch_size on it, or wrap the data set for a second order"
        )


def _known_states(tables: Sequence[Sequence[Sequence[Any]]]) -> list[list[Any]]:
    """Of each substream the state that one of the ranks has; None where none has it."""
    return [
        [next((c for c in cells if c is not None), None) for cells in zip(*rows, strict=True)]
        for rows in zip(*tables, strict=True)
    ]
