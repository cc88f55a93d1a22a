"""Lifetimes of border values, as pictures, and the most that is alive at once."""

from collections.abc import Mapping

from synchromesh.cost.alive_bytes import AliveBytes, Lifetimes, form_of
from synchromesh.trace.partition.local import Input, Output
from synchromesh.values.component import Rows, Value
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED
from synchromesh.values.profile import Memory
from tests.cost.plans import drawn

ALONE = Layout(1, 1)
VALUES = {name: Value(name, (1, 3), "float32", Rows(), True) for name in "xhgy"}


def picture(
    parts: Mapping[str, str], kept: str = "", handed: str = "", layout: Layout = ALONE
) -> list[str]:
    """What is gone after each forward, each backward, and the backward of stage 0.

    parts: what a component reads, and what it makes. kept: values that readers keep."""
    made_by = {made: i for i, made in enumerate(parts.values())}
    planned = drawn(
        [
            {
                "inputs": tuple(
                    Input(VALUES[r], made_by.get(r), REPLICATED, REPLICATED) for r in reads
                ),
                "outputs": (Output(VALUES[made], REPLICATED),),
            }
            for reads, made in parts.items()
        ],
        layout,
    )
    components = dict(enumerate(planned.partition.components))
    memory = {
        i: Memory(kept_inputs=tuple(n for n, r in enumerate(reads) if r in kept))
        for i, reads in enumerate(parts)
    }
    forms = {form_of(VALUES[name], layout, REPLICATED): 0 for name in handed}
    found = Lifetimes(components, memory, forms)
    ends = [found.after_forward[i] for i in components]
    ends += [found.after_backward[i] for i in reversed(components)]
    return ["".join(sorted(name for name, *_ in its)) for its in (*ends, found.after_stage(0))]


CHAIN = {"x": "h", "h": "g", "hg": "y"}  # x -> c0 -> h -> c1 -> g, h and g -> c2 -> y


def test_a_value_is_dropped_after_its_last_reader() -> None:
    """x is the batch's; y has no reader."""
    assert picture(CHAIN)[:3] == ["x", "", "ghy"]


def test_what_a_backward_reads_stays_until_the_first_component_that_kept_it_is_done() -> None:
    #                             c0   c1  c2    B2   B1   B0  stage
    assert picture(CHAIN, "h") == ["x", "", "gy", "", "h", "", ""]
    assert picture(CHAIN, "hg") == ["x", "", "y", "g", "h", "", ""]


def test_recomputation_keeps_every_input() -> None:
    recomputing = Layout(1, 1, recompute=True)
    assert picture(CHAIN, layout=recomputing) == ["x", "", "y", "g", "h", "", ""]


def test_what_is_handed_on_stays_until_its_makers_stage_is_done() -> None:
    assert picture(CHAIN, "h", handed="hy") == ["x", "", "g", "", "", "", "hy"]


def test_the_highest_moment_is_known_by_kind() -> None:
    alive = AliveBytes({"sum": "gradients"})
    alive.set(("value", 0), 10.0)
    alive.set(("sum", 0), 5.0)
    alive.meanwhile(3.0)
    alive.set(("sum", 0), 1.0)
    alive.free(("value", 0))
    alive.meanwhile(3.0)
    assert (alive.now, alive.highest) == (1.0, 18.0)
    assert alive.of_highest == {"activations": 13.0, "gradients": 5.0}
