"""The catalogue: its names, its figures and their sources, against the published tables."""

import csv
import re
from statistics import median

import pytest

from synchromesh import catalogue
from synchromesh.catalogue import sheet
from synchromesh.estimate import network
from synchromesh.values.cluster import Cluster
from synchromesh.values.profile import Pattern
from tests.published import published


def test_names_are_clusters_that_survive_their_forms() -> None:
    names = catalogue.names()
    assert len(set(names)) == len(names) > 100
    assert {"v100x1", "v100x8", "h100x16", "t4x4", "a100x16-ethernet25"} <= set(names)
    for name in names:
        cluster = catalogue.cluster(name)
        assert cluster.name == name and len(cluster.ranks) == int(re.findall(r"x(\d+)", name)[-1])
        assert cluster.source == "datasheet" and cluster.date and 0 < cluster.error_band < 1
        assert Cluster.from_yaml(cluster.to_yaml()) == cluster


@pytest.mark.parametrize(
    ("name", "hosts"),
    [
        ("h100x16", [8, 8]),
        ("h100x20", [8, 8, 4]),
        ("t4x6", [4, 2]),
        ("rtx3070x2", [2]),
        ("a100-40gbx3", [3]),
    ],
)
def test_devices_fall_into_the_usual_hosts(name: str, hosts: list[int]) -> None:
    cluster = catalogue.cluster(name)
    assert [len(h.devices) for h in cluster.hosts] == hosts
    assert (cluster.network is None) == (len(hosts) == 1)


def test_a_thousand_devices_have_two_kinds_of_links() -> None:
    cluster = catalogue.cluster("h100x4096")
    assert len(cluster.hosts) == 512 and cluster.links == ()
    assert cluster.link("host0", "host0").kind == "nvlink"
    assert cluster.link("host3", "host511").kind == "efa"
    assert cluster.link("host3", "host511") == cluster.link("host511", "host3")
    assert str(cluster) == "h100x4096: 512 hosts, 4096 devices, datasheet, +-25%"


def test_a_slower_network_by_name() -> None:
    usual, slow = catalogue.cluster("a100x16"), catalogue.cluster("a100x16-ethernet25")
    assert usual.hosts == slow.hosts and usual.inside == slow.inside
    assert slow.network and usual.network
    assert slow.network.bytes_per_second < 0.1 * usual.network.bytes_per_second
    assert slow.error_band == 0.25  # calibrated on somebody's measurement
    assert catalogue.cluster("t4x8").error_band == 0.5  # data-sheet rates alone


def test_racks_and_pods_by_name() -> None:
    """Of the published cluster: 24,576 devices, a seventh of a pod's bandwidth between pods."""
    pods = catalogue.cluster("h100x24576-infiniband3200-pods")
    assert [level.size for level in pods.topology] == [8, 2, 192, 8]
    host, rack, pod = (link.bytes_per_second for link in pods.levels.links if link)
    assert rack == 2 * host and pod == pytest.approx(384 * host / 7)
    thin, flat = (catalogue.cluster(f"a100x64-ethernet100{x}") for x in ("-over4", ""))
    assert [level.size for level in thin.topology] == [8, 4, 1, 2]
    across = {("all_reduce", Pattern(2, 32)), ("all_reduce", Pattern(2, 8))}
    slow, quick = (network.curves(c, across) for c in (thin, flat))
    far, near = Pattern(2, 32), Pattern(2, 8)
    assert slow["all_reduce", far](1e9) > 3.5 * quick["all_reduce", far](1e9)
    assert slow["all_reduce", near](1e9) == pytest.approx(quick["all_reduce", near](1e9))
    assert catalogue.cluster("h100x8-over4").topology == ()  # one host has no racks
    assert len(catalogue.cluster("h100x16-infiniband400-pods").ranks) == 16


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("h100x72-over4", "give a number of devices that fills racks of 32 devices"),
        ("h100x3088-pods", "fills pods of 3072"),
        ("h100x32-over0", "-overN or -pods"),
        ("h100", "did you mean 'h100x"),
        ("a10x8", "did you mean 'a10gx8'"),
        ("h100x0", "has no cluster 'h100x0'"),
        ("h100x8-ethernt25", "a network of ethernet10, ethernet25"),
        ("h100x8-nvlink4", "a network of ethernet10"),
        ("", "has no cluster ''"),
        ("h100x70000", "70000 devices are more than the 65536"),
    ],
)
def test_unknown_names(name: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=re.escape(sentence)) as error:
        catalogue.cluster(name)
    assert "\n" not in str(error.value)


def test_every_figure_has_a_source_with_an_address() -> None:
    sheets = sheet.sheets()
    for path, figure in sheet.figures(sheets):
        source = sheets.sources[figure.source]
        assert source.title and figure.value > 0, path
        if figure.status in ("seen", "derived"):
            assert source.url.startswith("https://") or figure.note, path
        if figure.status in ("derived", "assumed"):
            assert figure.note, f"{path}: say how or why"


def test_rates_are_peaks_times_what_products_reach() -> None:
    h100 = catalogue.cluster("h100x1").hosts[0].devices[0]
    assert h100.flops["bfloat16"] == pytest.approx(989e12 * 0.803)
    assert h100.flops["float8"] == pytest.approx(1979e12 * 0.709)
    assert h100.flops["float32"] == pytest.approx(67e12 * 0.8)  # default
    v100 = catalogue.cluster("v100x1").hosts[0].devices[0]
    assert "bfloat16" not in v100.flops and v100.bytes_per_second == 900e9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("inside: nvlink4", "inside: nvlink7", "h100: there is no class of links 'nvlink7'"),
        ("source: gpu-catalog", "source: hearsay", "there is no source 'hearsay'"),
        ("status: seen", "status: sure", "status: should be one of seen, memory"),
        ("float16:", "float17:", "peak_flops: unknown key 'float17'"),
    ],
)
def test_sheets_with_faults(old: str, new: str, message: str) -> None:
    folder = sheet.resources.files("synchromesh.catalogue")
    devices, links = ((folder / f).read_text() for f in ("devices.yaml", "links.yaml"))
    with pytest.raises(ValueError, match=message):
        sheet.parse(devices.replace(old, new), links)


# its row in the published table, and the column of each of its figures
ROWS = {
    "v100": "V100 SXM2 16/32GB", "t4": "T4 16GB", "l4": "L4 24GB",
    "a100-40gb": "A100 SXM 40GB", "a100": "A100 SXM 80GB", "h100": "H100 SXM 80GB",
    "h200": "H200 SXM 141GB", "b200": "B200 SXM 180GB",
}  # fmt: skip
COLUMNS = {"float32": "fp32_tflops", "tf32": "tf32_dense_tflops", "float16": "fp16_dense_tflops",
           "bfloat16": "bf16_dense_tflops"}  # fmt: skip


def test_figures_are_those_of_the_published_tables() -> None:
    with published("device_catalogue.csv").open() as file:
        rows = {row["device"]: row for row in csv.DictReader(file)}
    for name, title in ROWS.items():
        device, row = sheet.sheets().devices[name], rows[title]
        for dtype, column in COLUMNS.items():
            peak = device.peak_flops.get(dtype)
            assert (f"{peak.value / 1e12:g}" if peak else "") == row[column], (name, dtype)
        assert f"{device.memory_bytes.value / 1e9:g}" == row["mem_gb"].split("/")[0]
        assert f"{device.bytes_per_second.value / 1e9:g}" == row["mem_bw_GBps"]


def test_the_default_fraction_and_its_spread_are_those_of_measured_products() -> None:
    with published("matmul_achievable.csv").open() as file:
        rows = [
            r for r in csv.DictReader(file) if r["dtype"] == "bf16" and "MI3" not in r["device"]
        ]
    reached = [float(r["efficiency_pct"]) / 100 for r in rows]
    default = sheet.sheets().default_fraction.value
    assert len(rows) == 6 and default == pytest.approx(median(reached), abs=0.01)
    assert max(abs(x / default - 1) for x in reached) < 0.09
