"""Verification of plans with servers: as one device computes, and what is sent to the byte."""

from fractions import Fraction

import pytest

from tests.verify.test_workers import document

pytestmark = pytest.mark.filterwarnings("ignore:nothing of")


@pytest.mark.wide(3)
@pytest.mark.parametrize(
    ("name", "plan", "servers"),
    [
        ("cnn", "data", 1),
        ("cnn", "hybrid:tensor=2", 2),
        ("bert", "data", 2),
        ("bert", "hybrid:tensor=2", 1),
        ("lstm", "data", 2),
        ("vit", "hybrid:tensor=2", 2),
    ],
)
def test_servers_compute_what_one_device_does(name: str, plan: str, servers: int) -> None:
    found = document(name, f"{plan}; @synchronisation=server:{servers}", 4)
    assert found["passed"], found["faults"]
    assert found["exact"] and found["oracle"] == "one device" and not found["reason"]
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]


@pytest.mark.parametrize(("ranks", "servers"), [(2, 1), (2, 2), (3, 1), (3, 2), (4, 1), (4, 4)])
def test_a_worker_sends_all_gradients_and_a_server_its_parameters(
    ranks: int, servers: int
) -> None:
    found = document("cnn", f"data; @synchronisation=server:{servers}", 4, ranks)
    assert found["passed"], found["faults"]
    kept = found["parameter_bytes_per_rank"]
    assert sum(kept[:servers]) == sum(kept)
    part = Fraction(sum(kept), servers)
    for rank, sent in enumerate(found["sent_bytes_per_step"]):
        due = (servers - (rank < servers)) * part + (ranks - 1) * part * (rank < servers)
        assert due <= sent <= 1.03 * due  # parts are as long as the largest one


@pytest.mark.parametrize(("ranks", "own"), [(3, "1"), (4, "3,0"), (5, "4")])
def test_servers_of_their_own_send_parameters_alone(ranks: int, own: str) -> None:
    servers = len(own.split(","))
    plan = f"data; @synchronisation=server:{servers}; @servers={own}"
    found = document("cnn", plan, 4, ranks)
    assert found["passed"], found["faults"]
    kept, serving = found["parameter_bytes_per_rank"], [*map(int, own.split(","))]
    assert sum(kept[rank] for rank in serving) == sum(kept)
    part = Fraction(sum(kept), servers)
    for rank, sent in enumerate(found["sent_bytes_per_step"]):
        due = (ranks - servers) * part if rank in serving else sum(kept)
        assert due <= sent <= 1.03 * due


def test_servers_on_all_workers_send_what_sharded_states_do() -> None:
    found = document("cnn", "data; @synchronisation=server:4", 4)
    sharded = document("cnn", "zero1", 4)
    assert found["sent_bytes_per_step"] == sharded["sent_bytes_per_step"]


def test_stages_have_servers() -> None:
    plan = "pipeline:stages=2,microbatches=3; @synchronisation=server:1"
    found = document("cnn", plan, 4)
    assert found["passed"], found["faults"]
    assert found["sent_bytes_per_step"] == found["explained_sent_bytes_per_step"]
