"""The layout of every component of a trainer, in the words of plans."""

from synchromesh.planner.wording import spec_of
from synchromesh.results.run import ComponentLayout
from synchromesh.training.trainer import Trainer
from synchromesh.values.layout import Layout


def component_layouts(trainer: Trainer) -> tuple[ComponentLayout, ...]:
    """In the order of the chain. A stage is a group of devices, counted from 0."""
    made = trainer.partition.components
    firsts = sorted({local.layout.first for local in made})
    return tuple(
        ComponentLayout(
            local.component.name, word(local.layout), firsts.index(local.layout.first),
            local.component.parameter_bytes,
        )
        for local in made
    )  # fmt: skip


def word(layout: Layout) -> str:
    """The word of a plan that has this layout on its devices: `hybrid:tensor=2`."""
    return "single" if layout.devices == 1 else str(spec_of(Layout(layout.data, layout.tensor)))
