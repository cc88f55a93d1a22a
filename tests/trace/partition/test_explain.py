"""Explanations: what a plan holds, sends and leaves whole, for pretended ranks."""

import json
import re
from typing import Any

import pytest
import torch

from synchromesh.programs.model import Model
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.partition.explain import Explanation, explain, text
from synchromesh.trace.partition.partition import partition
from synchromesh.values.plan import Plan
from synchromesh.values.traffic import sent_bytes
from tests.models import FAMILIES
from tests.traces import remembered


def explained(family: str, plan: str, world: int, rows: int = 8, **settings: Any) -> Explanation:
    model, loss, make = FAMILIES[family]()
    chosen = Plan.parse(plan)
    held = Model(model)
    cuts = chosen.cuts(held.paths())
    step = remembered(family, model, loss, make(rows), training=True, cuts=cuts)
    names = step.chain.names
    layouts = chosen.layouts(names, world, held.inside(names))
    return explain(step, partition(step, layouts, rows=rows), chosen, world, rows, **settings)


def whole(family: str) -> int:
    return sum(p.numel() * p.element_size() for p in FAMILIES[family]()[0].parameters())


def test_data_sums_every_gradient_and_nothing_else() -> None:
    told = explained("cnn", "data", 4)
    size = whole("cnn")
    assert told.parameter_bytes_per_rank == (size,) * 4
    assert told.sent_bytes_per_step == (sent_bytes("all_reduce", size, 4),) * 4
    assert {c.direction for p in told.components for c in p.collectives} == {"gradient"}
    assert {c.collective for c in told.edges} == {"none"}


def test_workers_that_train_alone_send_means_of_parameters() -> None:
    told = explained("cnn", "data; @synchronisation=local:8", 4)
    size = whole("cnn")
    assert told.sent_bytes_per_step == (sent_bytes("all_reduce", size, 4) // 8,) * 4
    means = [c for p in told.components for c in p.collectives]
    assert {(c.direction, c.ranks, c.every) for c in means} == {("parameters", 4, 8)}
    assert sum(c.bytes for c in means) == size
    assert "on 4 ranks, parameters, every 8 steps" in text(told)


def test_rings_and_servers_are_said_side_by_side() -> None:
    told, served = (
        explained("cnn", "data", 4),
        explained("cnn", "data; @synchronisation=server:1", 4),
    )
    assert told.exchanges == served.exchanges
    words = {e.word: e for e in told.exchanges}
    assert set(told.sent_bytes_per_step) == {words["every-step"].worker}
    one = words["server:1"]
    assert served.sent_bytes_per_step == (one.server, *(one.worker,) * 3)
    assert (
        f"server:1:            {one.server:,} from each server, {one.worker:,} from each"
        in text(told)
    )
    assert not explained("cnn", "tensor", 4).exchanges


def test_one_rank_sends_nothing_and_an_idle_rank_holds_nothing() -> None:
    assert explained("cnn", "data", 1).sent_bytes_per_step == (0,)
    told = explained("cnn", "single", 3)
    assert told.parameter_bytes_per_rank == (whole("cnn"), 0, 0)
    assert told.sent_bytes_per_step == (0, 0, 0)


def test_a_mixed_plan_names_its_crossing() -> None:
    told = explained("cnn", "data; hidden=tensor; classifier=tensor", 2)
    parts = {p.name: p for p in told.components}
    assert (parts["hidden"].data, parts["hidden"].tensor) == (1, 2)
    assert parts["hidden"].sharded_parameter_bytes > 0.9 * parts["hidden"].parameter_bytes
    crossing = next(c for c in told.edges if c.target == "hidden" and c.source != "batch")
    assert crossing.have.startswith("2x1") and crossing.want.startswith("1x2")
    assert crossing.collective != "none" and crossing.bytes == 64 * 4 * 8
    assert told.parameter_bytes_per_rank[0] < whole("cnn")


def test_what_is_whole_has_its_reason() -> None:
    told = explained("lstm", "tensor", 4)
    reasons = {n: why for p in told.components for n, why in p.not_sharded.items()}
    assert "no rule shards aten.lstm" in reasons["rnn.weight_ih_l0"]
    assert all("aten.lstm" in why or "cost" in why for why in reasons.values())


def test_sizes_that_do_not_divide_are_sharded() -> None:
    """13-31-7-5 on four ranks: what each holds, the first most."""
    told = explained("odd_mlp", "tensor", 4)
    held = told.parameter_bytes_per_rank
    assert list(held) == sorted(held, reverse=True) and held[0] > held[3]
    assert held[0] < 0.35 * whole("odd_mlp")
    sharded = sum(p.sharded_parameter_bytes for p in told.components)
    assert sharded > 0.9 * whole("odd_mlp")


def test_a_reason_that_several_parameters_have_is_said_once() -> None:
    told = explained("lstm", "tensor", 2)
    (line,) = [x for x in text(told).splitlines() if "no rule shards aten.lstm" in x]
    assert line.startswith("  not sharded, as no rule") and "rnn.weight_ih_l0, rnn" in line
    (rnn,) = [p for p in told.components if p.name == "rnn"]
    assert len(rnn.not_sharded) == 8 and rnn.sharded_parameter_bytes == 0


def test_batch_norm_is_counted_as_it_runs() -> None:
    synchronised = explained("resnet", "data", 2)
    apart = explained("resnet", "data", 2, sync_batch_norm=False)
    assert (synchronised.batch_norm, apart.batch_norm) == ("synchronised", "per row block")
    channels = [
        b.shape[0]
        for n, b in FAMILIES["resnet"]()[0].named_buffers()
        if n.endswith("running_mean")
    ]
    gathered = sum((2 * c + 1) * 4 * 2 for c in channels)
    reduced = sum(2 * c * 4 for c in channels)
    numbers = sent_bytes("all_gather", gathered, 2) + sent_bytes("all_reduce", reduced, 2)
    assert synchronised.sent_bytes_per_step[0] - apart.sent_bytes_per_step[0] == numbers


@pytest.mark.parametrize("plan", ["data", "tensor", "hybrid:tensor=2"])
def test_the_document_and_the_text_say_the_same(plan: str) -> None:
    told = explained("bert", plan, 4)
    document = json.loads(json.dumps(told.document(), allow_nan=False))
    assert document["ranks"] == 4 and document["plan"] == plan
    keys = {"name", "data", "tensor", "parameter_bytes", "sharded_parameter_bytes", "collectives"}
    assert all(keys <= part.keys() for part in document["components"])
    assert all({"from", "to", "bytes", "collective"} <= edge.keys() for edge in document["edges"])
    assert all({"kind", "direction", "bytes"} <= c.keys()
               for part in document["components"] for c in part["collectives"])  # fmt: skip
    lines = text(told).splitlines()
    assert f"plan {plan} on 4 ranks, 8 rows a step" in lines[0]
    for part in document["components"]:
        assert any(line.startswith(f"{part['name']}  data({part['data']})") for line in lines)
        for name in part["placements"]:
            assert any(line.strip().startswith(f"{name}: ") for line in lines)
    assert sum(p["parameter_bytes"] for p in document["components"]) >= whole("bert")
    assert torch.get_num_threads() == 1


def test_rows_that_depend_on_each_other_are_named() -> None:
    def contrast(model: Any, batch: Any) -> torch.Tensor:
        z = model(batch)
        return (z @ z.t()).logsumexp(1).mean()

    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, 8))
    step = trace(model, contrast, torch.randn(8, 8), training=True)
    plan = Plan.parse("data")
    layouts = step.undivided(plan.layouts(step.chain.names, 4))
    told = explain(step, partition(step, layouts, rows=8), plan, 4, 8)
    assert told.coupled.startswith("1: matmul") and told.document()["coupled"] == told.coupled
    assert "rows depend on each other, each rank computes all: 1: matmul" in text(told)
    assert [(c.data, c.tensor) for c in told.components] == [(4, 1), (1, 4)]
    assert not explained("cnn", "data", 2).coupled


def test_what_is_sharded_over_which_ranks_is_said() -> None:
    told = text(explained("odd_mlp", "data", 2))
    assert "sharded" not in told
    told = text(explained("odd_mlp", "hybrid:tensor=2,states=parameters", 4))
    assert ", optimizer state, gradients and parameters sharded over data ranks  " in told
    assert re.search(r"bytes of parameters, \d+% sharded over tensor ranks, ", told)
    assert ", optimizer state sharded over data ranks  " in text(explained("odd_mlp", "zero1", 2))
