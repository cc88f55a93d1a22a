"""Random models under random plans against one process: levels of sharded states, recomputation,
stages, micro-batches, accumulation, rows that do not divide, several buckets of two data types.

    SYNCHROMESH_SAMPLES=500 pytest tests/training/test_random_plans.py
"""

import os
import warnings
from collections.abc import Sequence
from contextlib import ExitStack

import pytest

from synchromesh.training.prepare import prepare
from tests.plain import Outcome, apart, plain
from tests.random_models import Sample, sample
from tests.ranks import run

SAMPLES = int(os.environ.get("SYNCHROMESH_SAMPLES", "12"))
AT_ONCE = 8  # samples that ranks go through before they are forked anew


def _under(one: Sample) -> Outcome | str:
    """What a rank computes; or the sentence that refuses the plan."""
    case, model = one.case, one.case.build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer = prepare(model, case.optimizer(model), case.loss, case.first(), one.plan)
        except ValueError as error:
            return str(error)
        losses = []
        for batch in case.batches:
            rows = len(batch[0])
            if one.halves and rows > 1:
                for part in (slice(0, rows // 2), slice(rows // 2, rows)):
                    own = trainer.shard(tuple(x[part] for x in batch))
                    value = trainer.backward(own, last=part.stop == rows)
                trainer.update()
            else:
                value = trainer.step(trainer.shard(batch), case.micro_batches)
            losses.append(float(value))
        found = Outcome(losses, trainer.state_dict(), [], trainer.traced.reason)
        trainer.close()
        return found


def _all_under(samples: Sequence[Sample]) -> list[Outcome | str]:
    found = []
    for one in samples:
        try:
            found.append(_under(one))
        except Exception as error:
            raise AssertionError(str(one)) from error
    return found


@pytest.mark.wide(1)
@pytest.mark.timeout(60 + 20 * SAMPLES)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_no_plan_differs_from_one_process(ranks: int) -> None:
    samples = [sample(seed, ranks) for seed in range(ranks, SAMPLES, 3)]
    refused, faults = [], []
    for start in range(0, len(samples), AT_ONCE):
        part = samples[start : start + AT_ONCE]
        with ExitStack() as traces:
            for one in part:
                traces.enter_context(one.case.one_trace(one.plan, ranks))
            try:
                outcomes = run(ranks, _all_under, part, timeout=300.0)
            except AssertionError as error:
                faults.append(str(error))
                continue
        for one, *found in zip(part, *outcomes, strict=True):
            if isinstance(found[0], str):
                refused.append(f"{one}: {found[0]}")
                continue
            expected = plain(one.case)
            gaps = [apart(outcome, expected) for outcome in found]
            if max(gaps) > one.limit:
                faults.append(f"{one}: {max(gaps):.1e}; {found[0].losses} {expected.losses}")
            if found[0].opaque:
                faults.append(f"{one}: untraced, {found[0].opaque}")
    print("\n".join(refused))
    assert not faults, "\n".join(faults)
    assert len(refused) <= len(samples) // 4, refused
