"""Descriptions of labs: their file, the cores that hosts get, the cluster, what is none."""

import os
from pathlib import Path

import pytest

from synchromesh.lab import Description, Emulated
from synchromesh.lab.description import parse_bandwidth, parse_share, show_bandwidth, show_share

TEXT = """
hosts:
  - {bandwidth: 200mbit, cpu: 40%, count: 3}
  - {bandwidth: 20mbit, cpu: 10%}
racks: [[0, 1], [2, 3]]
uplink: 100mbit
"""


def load(text: str, folder: Path) -> Description:
    (folder / "lab.yaml").write_text(text)
    return Description.load(folder / "lab.yaml")


def test_a_file_describes_hosts_and_racks(tmp_path: Path) -> None:
    found = load(TEXT, tmp_path)
    fast, slow = Emulated(200_000_000, 0.4), Emulated(20_000_000, 0.1)
    assert found == Description((fast, fast, fast, slow), ((0, 1), (2, 3)), 100_000_000)
    assert Description.from_dict(found.to_dict()) == found
    assert [found.rack(host) for host in range(4)] == [0, 0, 1, 1]
    assert str(slow) == "20mbit, 10% of a core"
    assert str(found) == f"hosts: 3 of {fast}; 1 of {slow}; racks 100mbit apart"


def test_memory_is_a_hosts_own(tmp_path: Path) -> None:
    found = load(TEXT.replace("cpu: 10%}", "cpu: 10%, memory: 1.5GiB}"), tmp_path)
    assert [host.memory for host in found.hosts] == [None] * 3 + [3 * 2**29]
    assert Description.from_dict(found.to_dict()) == found
    assert str(found.hosts[3]) == "20mbit, 10% of a core, 1536MiB"
    devices = [h.devices[0].memory_bytes for h in found.cluster("c", 2**34, "2026-01-31").hosts]
    assert devices == [2**32] * 3 + [3 * 2**29]
    assert Description.alike(2, "200mbit", "40%", memory=["1GB", None]).hosts[0].memory == 10**9


def test_hosts_alike_or_not() -> None:
    alike = Description.alike(2, "200mbit", "40%")
    assert alike == Description.alike(None, ["200mbit", 2e8], 0.4)
    assert str(alike) == "hosts of 200mbit, 40% of a core"
    said = "3 hosts need 3 bandwidths, shares and memories, or one for all"
    with pytest.raises(ValueError, match=said):
        Description.alike(3, ["200mbit", "100mbit"], 0.4)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("uplink:", "uplinks:", "lab.yaml: unknown key 'uplinks'; known are hosts, racks, uplink"),
        ("uplink: 100mbit", "", "lab.yaml: racks and uplink belong together"),
        ("racks: [[0, 1], [2, 3]]", "", "lab.yaml: racks and uplink belong together"),
        ("100mbit", "100", "lab.yaml: uplink: should be text with its unit, as 100mbit, not 100"),
        ("100mbit", "100MB", "lab.yaml: uplink: '100MB' is not a bandwidth"),
        ("[2, 3]", "[2]", r"lab.yaml: racks: should hold each of the hosts 0 to 3 once, not \[0,"),
        ("[2, 3]", "[1, 2, 3]", "lab.yaml: racks: should hold each of the hosts 0 to 3 once"),
        (
            "[2, 3]",
            "[2], [3]",
            r"racks: should be two lists of hosts, as .*, not \[\[0, 1\], \[2\], \[3\]\]",
        ),
        ("[2, 3]", "[2, three]", r"racks\[1\]: should be a whole number, not text 'three'"),
        ("cpu: 10%", "cpu: 0.1", r"hosts\[1\].cpu: should be text with its unit, as 40%, not 0.1"),
        ("cpu: 10%", "cpu: 1%", r"hosts\[1\].cpu: a share of 1% of a core is outside 2% to"),
        ("cpu: 10%", "cpu: 10%, memory: 1G", r"hosts\[1\].memory: '1G' is no size as 8GiB"),
        ("cpu: 10%", "cpu: 10%, memory: 1KB", r"memory of 1KB is outside 16MiB to 1024TiB: try 1"),
        ("cpu: 10%", "cpu: 10%, memory: 2000TB", r"memory of 2000TB is outside 16MiB to 1024TiB"),
        ("cpu: 10%", "cpu: 10%, memory: 9", r"hosts\[1\].memory: should be text .* 1GiB, not 9"),
        ("cpu: 10%", "cpus: 10%", r"hosts\[1\]: unknown key 'cpus'"),
        (", cpu: 10%", "", r"hosts\[1\]: cpu is missing"),
        (": 20mbit", ": 20", r"hosts\[1\].bandwidth: should be text with its unit, as 200mbit"),
        ("count: 3", "count: 0", r"hosts\[0\].count: should be from 1 to 200, not 0"),
        ("count: 3", "count: 200", "the number of emulated hosts must be 1 to 200, not 201"),
        ("hosts:", "hosts: []\nhosts:", "lab.yaml: the key 'hosts' stands there twice"),
    ],
)
def test_files_that_describe_no_lab(old: str, new: str, message: str, tmp_path: Path) -> None:
    assert TEXT.count(old) >= 1
    with pytest.raises(ValueError, match=message):
        load(TEXT.replace(old, new), tmp_path)


def pinned(cpus: list[float], cores: int) -> list[tuple[int, ...]]:
    shapes = tuple(Emulated(10**8, cpu) for cpu in cpus)
    return [*Description(shapes).pins(range(cores))]


def test_hosts_are_dealt_out_over_the_cores() -> None:
    assert pinned([0.4] * 4, 2) == [(0,), (1,), (0,), (1,)]
    assert pinned([0.9, 0.1, 0.9, 0.1], 2) == [(0,), (0,), (1,), (1,)]
    assert pinned([0.5, 1.5, 0.5], 4) == [(2,), (0, 1), (3,)]
    assert pinned([0.4] * 3, 1) == [(0,)] * 3


def excess(cpus: list[float], cores: int) -> str:
    shapes = tuple(Emulated(10**8, cpu) for cpu in cpus)
    return Description(shapes).excess(range(cores)) or ""


def test_more_than_there_is() -> None:
    assert excess([0.4] * 4, 2) == excess([0.5] * 4, 2) == excess([1.5], 2) == ""
    assert excess([0.4] * 8, 2) == (
        "8 hosts x 40% ask for 3.2 cores, but this machine has 2 and the busiest would carry "
        "160%: the hosts will be slower than stated; --cpu 25% would fit"
    )
    assert excess([0.6] * 3, 2).endswith("the busiest would carry 120%: the hosts will be slower "
                                         "than stated; --cpu 50% would fit")  # fmt: skip
    assert excess([0.2] * 30, 2).endswith("; 10 hosts would fit")
    assert excess([0.8, 0.4, 0.4, 0.4, 0.4], 2).endswith("; 83 % of each share would fit")


def test_a_remedy_is_one(tmp_path: Path) -> None:
    for count in (3, 5, 8, 13):
        warning = excess([0.9] * count, 2)
        share = float(warning.split("--cpu ")[1].split("%")[0]) / 100
        assert excess([share] * count, 2) == ""


def test_the_cluster_of_a_lab_is_emulated(tmp_path: Path) -> None:
    cluster = load(TEXT, tmp_path).cluster("own", 8 * 10**9, "2026-01-31")
    assert cluster.emulated and cluster.source == "lab" and cluster.date == "2026-01-31"
    assert str(cluster) == "own: 4 hosts, 4 devices, lab, emulated"
    assert {device.memory_bytes for _, device in cluster.ranks} == {2 * 10**9}
    speeds = {(x.a[-1], x.b[-1]): x.bytes_per_second * 8 / 1e6 for x in cluster.links}
    assert speeds == {
        ("0", "1"): 200, ("0", "2"): 100, ("0", "3"): 20,
        ("1", "2"): 100, ("1", "3"): 20, ("2", "3"): 20,
    }  # fmt: skip


def test_a_share_may_be_all_cores() -> None:
    cores = os.cpu_count() or 1
    assert Description.alike(1, "1gbit", f"{cores * 100}%").hosts[0].cores == cores


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200mbit", 200_000_000),
        ("1.5gbit", 1_500_000_000),
        ("50 Mbit/s", 50_000_000),
        (" 800kbps", None),
        ("800kbitps", 800_000),
        ("100kbit", 100_000),
        (2.5e7, 25_000_000),
    ],
)
def test_bandwidths(text: str | float, bits: int | None) -> None:
    if bits is None:  # kbps is kilobytes to some and kilobits to others
        with pytest.raises(ValueError, match="is not a bandwidth"):
            parse_bandwidth(text)
    else:
        assert parse_bandwidth(text) == bits and parse_bandwidth(show_bandwidth(bits)) == bits


@pytest.mark.parametrize(
    "text", ["200", "200MB", "mbit", "-5mbit", "1e3mbit", "", "0x2mbit", True]
)
def test_what_is_no_bandwidth(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a bandwidth: write .* 200mbit"):
        parse_bandwidth(text)


@pytest.mark.parametrize("text", ["0mbit", "99kbit", "11gbit", 1e300, float("-inf")])
def test_bandwidths_out_of_range(text: object) -> None:
    with pytest.raises(ValueError, match="is outside 100kbit to 10gbit: try 200mbit"):
        parse_bandwidth(text)


def test_shares() -> None:
    assert parse_share("40%", 2) == parse_share(0.4, 2) == 0.4
    assert parse_share("200 %", 2) == 2 and parse_share("12.5%", 2) == 0.125
    assert [show_share(x) for x in (0.4, 0.125, 2.0)] == ["40%", "12.5%", "200%"]
    assert [show_bandwidth(x) for x in (2e8, 1.5e9, 1e5)] == ["200mbit", "1.5gbit", "100kbit"]


@pytest.mark.parametrize("text", ["40", "0.4", "%", "-40%", "forty%", None])
def test_what_is_no_share(text: object) -> None:
    with pytest.raises(ValueError, match=r"is not a share of a core: write .* 40%"):
        parse_share(text, 2)


@pytest.mark.parametrize("value", ["1.9%", "201%", 0.0, float("nan")])
def test_shares_out_of_range(value: object) -> None:
    with pytest.raises(ValueError, match=r"of a core is outside 2% to 200% \(2 cores\): try 40%"):
        parse_share(value, 2)
