"""A cluster: its forms, its ranks and links, and documents that describe none."""

from dataclasses import replace
from pathlib import Path

import pytest

from synchromesh.values.cluster import Cluster, Device, Host, Link

TEXT = """
name: two-hosts
date: 2026-01-31
emulated: true
hosts:
  - name: a
    devices: [{kind: cpu, count: 2, memory_bytes: 8000000000, flops: {float32: 5e10}}]
  - name: b
    devices: [{kind: cpu, memory_bytes: 4000000000}]
links:
  - {between: [a, b], bytes_per_second: 2.5e+7, latency_seconds: 1e-3}
"""


def test_a_cluster_survives_its_forms(tmp_path: Path) -> None:
    cluster = Cluster.from_yaml(TEXT)
    fast, slow = Device("cpu", 8 * 10**9, {"float32": 5e10}), Device("cpu", 4 * 10**9)
    assert cluster == Cluster(
        "two-hosts",
        (Host("a", (fast, fast)), Host("b", (slow,))),
        (Link("a", "b", 2.5e7, 1e-3),),
        emulated=True,
        date="2026-01-31",
    )
    assert Cluster.from_json(cluster.to_json()) == Cluster.from_yaml(cluster.to_yaml()) == cluster
    (tmp_path / "c.yaml").write_text(TEXT)
    assert Cluster.load(tmp_path / "c.yaml") == cluster and hash(cluster)
    assert [host for host, _ in cluster.ranks] == ["a", "a", "b"]
    assert str(cluster) == "two-hosts: 2 hosts, 3 devices, emulated"


def test_links() -> None:
    cluster = Cluster.from_yaml(TEXT)
    assert cluster.link("b", "a").seconds(25_000_000) == pytest.approx(1.001)
    with pytest.raises(ValueError, match="no link between 'a' and 'a'"):
        cluster.link("a", "a")


def test_links_that_are_not_listed() -> None:
    inside, network = Link("x", "y", 1e9, kind="loopback"), Link("a", "b", 1e8, lanes=4)
    cluster = replace(Cluster.from_yaml(TEXT), inside=inside, network=network)
    assert cluster.link("b", "b") == Link("b", "b", 1e9, kind="loopback")
    assert cluster.link("b", "a").bytes_per_second == 2.5e7  # what is listed goes first
    assert replace(cluster, links=()).link("b", "a") == network
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster == Cluster.from_json(cluster.to_json())


def test_equal_clusters_are_equal() -> None:
    cluster = Cluster.from_yaml(TEXT)
    hosts, default = cluster.hosts, Link("*", "*", 1e9)
    ab, aa = Link("b", "a", 2.5e7), Link("a", "a", 1e9)
    first = Cluster("c", hosts, (ab, aa), inside=default)
    assert first == Cluster("c", hosts, (Link("a", "b", 2.5e7),), inside=default)
    assert hash(first) == hash(Cluster("c", hosts, (aa, ab), inside=default))
    assert first != Cluster("c", hosts, (ab,))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("name: b", "name: a", "two hosts are called a"),
        ("[a, b]", "[a, c]", "a link names 'c', which is no host"),
        ("[a, b]", "[a]", r"links\[0\]\.between: should name two hosts, not 1"),
        ("2.5e+7", "0", r"links\[0\]\.bytes_per_second: should be at least"),
        ("2.5e+7", ".inf", r"links\[0\]\.bytes_per_second: should be a finite number, not inf"),
        (
            "2.5e+7",
            "1e308",
            r"links\[0\]\.bytes_per_second: should be at most 1e\+24, not 1e\+308",
        ),
        ("1e-3", "1e308", r"links\[0\]\.latency_seconds: should be at most 3600, not"),
        ("5e10", "0", r"devices\[0\]\.flops\.float32: should be at least 1, not 0"),
        ("8000000000", "1e300", r"devices\[0\]\.memory_bytes: should be at most 1e\+18, not"),
        ("kind: cpu, c", "kind: cpu, bytes_per_second: 1e-300, c", "second: should be at least 1"),
        ("float32", "float31", r"hosts\[0\]\.devices\[0\]\.flops: unknown key 'float31'"),
        ("count: 2", "count: -2", r"devices\[0\]\.count: should be from 1"),
        ("emulated: true", "emulated: 1", "emulated: should be true or false, not 1"),
        ("date:", "dates:", "unknown key 'dates'"),
        ("name: b", "name: '*'", "a host is called '\\*', which stands for any"),
        ("links:", "inside: {latency_seconds: 1}\nlinks:", "inside: bytes_per_second is missing"),
        ("links:", "network: {between: [a, b]}\nlinks:", "network: unknown key 'between'"),
        ("latency_seconds: 1e-3}", "lanes: 0}", r"links\[0\]\.lanes: should be from 1"),
        (
            "links:",
            "links:\n  - {between: [b, a], bytes_per_second: 1}",
            "two links join 'a' and 'b'",
        ),
    ],
)
def test_documents_that_describe_no_cluster(old: str, new: str, message: str) -> None:
    assert TEXT.count(old) >= 1
    with pytest.raises(ValueError, match=message):
        Cluster.from_yaml(TEXT.replace(old, new))


LEVELS = """
name: racks
hosts: [{name: a, devices: [{kind: cpu, count: 2, memory_bytes: 1}]},
        {name: b, devices: [{kind: cpu, count: 2, memory_bytes: 1}]}]
topology:
  - {name: host, size: 2, link: {bytes_per_second: 1e9}}
  - {name: rack, size: 2, link: {bytes_per_second: 1e8, lanes: 2}, oversubscription: 4}
  - {name: core, size: 1}
"""


def test_levels_of_a_network() -> None:
    cluster = Cluster.from_yaml(LEVELS)
    assert Cluster.from_yaml(cluster.to_yaml()) == cluster == Cluster.from_json(cluster.to_json())
    assert cluster.link("a", "a").bytes_per_second == 1e9
    assert cluster.link("a", "b").lanes == 2
    rates = [link.bytes_per_second for link in cluster.levels.links if link]
    assert rates == [1e8, 2 * 1e8 / 4]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("size: 1}", "size: 2}", "2 x 2 x 2 are 8 devices, but the hosts have 4"),
        ("host, size: 2", "host, size: 4", "4 devices a host, but hosts have 2"),
        ("oversubscription: 4", "oversubscription: 0.5", r"\[1\]\.oversubscription: .*at least"),
        ("oversubscription: 4", "oversubscription: .inf", "should be a finite number"),
        (", lanes: 2}", "}, speed: 3", r"topology\[1\]: .*speed"),
        ("link: {bytes_per_second: 1e8, lanes: 2}, ", "",
         "first two levels are hosts and what joins them, each with a link"),
        ("topology:", "network: {bytes_per_second: 1}\ntopology:", "leave these out"),
        ("count: 2", "count: 40000", "has 80000 devices; a cluster has 1 to 65,536"),
    ],
)  # fmt: skip
def test_levels_that_are_none(old: str, new: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Cluster.from_yaml(LEVELS.replace(old, new))


def test_a_cluster_of_another_size() -> None:
    cluster = Cluster.from_yaml(TEXT)
    assert cluster.resized(3) is cluster
    assert [len(h.devices) for h in cluster.resized(1).hosts] == [1]
    more = replace(cluster, network=Link("*", "*", 1e8)).resized(5)
    assert [len(h.devices) for h in more.hosts] == [2, 1, 1, 1]
    assert more.link("a", "b").bytes_per_second == 2.5e7
    assert more.link("b", more.hosts[3].name).bytes_per_second == 1e8
    racks = Cluster.from_yaml(LEVELS)
    sizes = {n: [level.size for level in racks.resized(n).topology] for n in (2, 8, 16)}
    assert sizes == {2: [2, 1, 1], 8: [2, 2, 2], 16: [2, 2, 4]}
    for wrong in (0, 70_000):
        with pytest.raises(ValueError, match=f"{wrong} devices are none of 1 to 65,536"):
            cluster.resized(wrong)
    with pytest.raises(ValueError, match="2 x 2 x 2 are 8 devices, but the hosts have 6"):
        racks.resized(6)
