"""Files of hardware, node types, clusters, and the links of their groups."""

import dataclasses
import datetime
import math

import networkx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import constants
from cost_models.errors import HardwareFileError, TopologyError, UnknownHardwareError
from cost_models.hardware import Cluster, assemble_node, device, node_type
from tests.cost_models.cluster_graph import axis_links, cluster_graph

FILES = sorted(constants.DATA.glob("*/*.toml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_constant_has_value_unit_source_and_date(path):
    """Each number of the data files is finite, has a known unit, a source, and an ISO date."""
    for name, constant in constants.read(path).constants.items():
        assert math.isfinite(constant.value), name
        assert constant.unit in {"B", "B/s", "FLOP/s", "s", "1", "devices", "nodes"}, name
        assert len(constant.source) > 8, name
        datetime.date.fromisoformat(constant.date)


@pytest.mark.parametrize("name", constants.names("nodes"))
def test_every_node_type_loads(name):
    """The efficiencies of every node type are above 0 and at most 1, and there is one for each peak."""
    kind = node_type(name)
    assert kind.name == name
    for share in (*kind.device.matmul.efficiency.values(), kind.device.memory_efficiency, kind.intra.efficiency):
        assert 0 < share <= 1
    assert set(kind.device.matmul.efficiency) == set(kind.device.peak_flops)


@pytest.mark.parametrize("name", constants.names("nodes"))
def test_a_cluster_survives_save_and_load(name, tmp_path):
    """A saved cluster is loaded equal."""
    nodes = 4 if node_type(name).inter else 1
    cluster = Cluster(name, nodes=nodes, devices_per_node=1)
    cluster.save(tmp_path / "mine.toml", source="a test", date="2026-11-20")
    assert Cluster.load(tmp_path / "mine.toml") == cluster


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    """A cluster with a bandwidth of a numpy type is saved and loaded equal."""
    cluster = Cluster(node_type("h100_sxm").with_network(bytes_per_s_per_device=np.float64(25e9)), 2)
    cluster.save(tmp_path / "mine.toml", source="a test", date="2026-11-20")
    assert Cluster.load(tmp_path / "mine.toml") == cluster


def test_unknown_hardware_names_what_is_known_and_how_to_add():
    """An unknown node type is refused, and the error lists the known types and the file to add."""
    with pytest.raises(UnknownHardwareError, match=r"'h900'.*h200.*data/nodes/h900\.toml"):
        Cluster("h900")


def test_unknown_dtype_of_a_known_device_raises():
    """A dtype without a peak is refused, such as f8 on an A100."""
    with pytest.raises(UnknownHardwareError, match=r"peak_flops\.f8"):
        device("a100_sxm_80gb").peak("f8")


def test_several_nodes_without_a_network_raise():
    """Several nodes of a type without a network are refused."""
    with pytest.raises(UnknownHardwareError, match="no network"):
        Cluster("cpu_laptop", nodes=2)


def test_too_many_devices_per_node_raise():
    """More devices in a node than its file states are refused."""
    with pytest.raises(TopologyError, match="1 to 8 devices"):
        Cluster("h100_sxm", nodes=1, devices_per_node=9)


def test_a_mesh_larger_than_the_cluster_raises():
    """A mesh of 16 ranks on a cluster of 8 devices is refused."""
    with pytest.raises(TopologyError, match="more ranks"):
        axis_links(Cluster("h100_sxm"), {"data": 16})


def test_an_unknown_axis_raises():
    """An axis that the mesh lacks is refused by name."""
    with pytest.raises(TopologyError, match="no axis 'model'"):
        Cluster("h100_sxm").group_links({"data": 8}, ("model",))


def test_axis_links_on_two_levels():
    """On nodes of 8 devices, a 2 x 8 x 4 mesh has pipeline links between nodes, tensor links inside, and data
    links on both."""
    links = axis_links(Cluster("h100_sxm", nodes=8, devices_per_node=8), {"pp": 2, "dp": 8, "tp": 4})
    assert {axis: (g.size, g.per_node, g.nodes) for axis, g in links.items()} == {
        "pp": (2, 1, 2),
        "dp": (8, 2, 4),
        "tp": (4, 4, 1),
    }
    assert links["pp"].intra is None
    assert links["tp"].inter is None


def test_joint_groups_span_the_product_of_axes():
    """A group over the outer and the inner axis has members in two nodes, four in each."""
    links = Cluster("h100_sxm", nodes=8).group_links({"pp": 2, "dp": 8, "tp": 4}, ("pp", "tp"))
    assert (links.size, links.per_node, links.nodes) == (8, 4, 2)


def test_uneven_groups_count_as_a_flat_ring():
    """Three ranks on nodes of two are a ring over three nodes, without links inside a node."""
    links = Cluster("h100_sxm", nodes=3, devices_per_node=2).group_links({"data": 2, "model": 3}, ("model",))
    assert (links.size, links.per_node, links.nodes, links.intra) == (3, 1, 3, None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_group_sizes_multiply_to_the_mesh(sizes, per_node):
    """The group of each axis has the axis's size, which is the members of a node times the nodes."""
    mesh = {f"axis{index}": size for index, size in enumerate(sizes)}
    nodes = -(-math.prod(sizes) // per_node)
    for axis, links in axis_links(Cluster("h100_sxm", nodes=nodes, devices_per_node=per_node), mesh).items():
        assert links.size == mesh[axis] == links.per_node * links.nodes


def test_the_topology_is_connected():
    """The graph of a cluster is connected, and a device has the link's bandwidth to its node's switch."""
    graph = cluster_graph(Cluster("h100_sxm", nodes=4, devices_per_node=8))
    assert networkx.is_connected(graph)
    reached = node_type("h100_sxm").intra.reached_bytes_per_s
    assert graph.edges[("device", 9), ("switch", 1)]["bytes_per_s"] == reached


def _write(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    return path


def test_a_constant_without_source_is_refused(tmp_path):
    """A constant without a source is refused with its name and the missing field."""
    path = _write(tmp_path, '[memory_bytes]\nvalue = 1\nunit = "B"\ndate = "2026-01-01"\n')
    with pytest.raises(HardwareFileError, match="'memory_bytes' lacks source"):
        constants.read(path)


def test_a_constant_without_a_value_is_refused(tmp_path):
    """A table with a unit but no value is refused."""
    path = _write(tmp_path, '[memory_bytes]\nunit = "B"\nsource = "x"\ndate = "2026-01-01"\n')
    with pytest.raises(HardwareFileError, match="memory_bytes has a unit, but no value"):
        constants.read(path)


def test_a_constant_in_another_unit_is_refused(tmp_path):
    """A constant with another unit than the reader's is refused."""
    path = _write(tmp_path, '[memory_bytes]\nvalue = 1\nunit = "GB"\nsource = "x"\ndate = "2026-01-01"\n')
    with pytest.raises(HardwareFileError, match="unit='GB'"):
        constants.read(path).number("memory_bytes", "B")


def test_a_missing_constant_is_named(tmp_path):
    """A missing constant is refused with the table to add."""
    with pytest.raises(HardwareFileError, match=r"\[intra\.bandwidth\]"):
        constants.read(_write(tmp_path, "")).number("intra.bandwidth", "B/s")


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    """A file that is no TOML, or no UTF-8, is refused by its name."""
    with pytest.raises(HardwareFileError, match=r"broken\.toml: not a TOML file"):
        constants.read(_write(tmp_path, "= 1"))
    (tmp_path / "broken.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(HardwareFileError, match=r"broken\.toml: not a TOML file: 'utf-8' codec"):
        constants.read(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("[memory_bytes]", "[nodes]\nvalue = 1\n[memory_bytes]", "not a TOML file: Cannot declare"),
        ("[memory_bytes]", "deep = " + "[" * 100_000, "not a file of hardware: maximum recursion"),
        ("[memory_bytes]", "[" + ".".join("a" * 500_000) + "]", "its tables lie in each other too deeply"),
        ("[memory_bytes]", " . ".join("a" * 500_000) + " = 1", "its tables lie in each other too deeply"),
        ("[memory_bytes]", "[" + ".".join("a" * 100) + "]", "its tables lie in each other too deeply"),
        ("[memory_bytes]", "huge = " + "9" * 5000 + "\n[memory_bytes]", "not a file of hardware: Exceeds the limit"),
    ],
    ids=("twice", "lists", "long table", "long key", "tables", "digits"),
)
def test_a_file_that_nobody_would_write_is_refused(tmp_path, old, new, message):
    """Tables that stand twice, deep nesting and endless numbers are refused with the name of the file."""
    Cluster("h100_sxm", 2).save(tmp_path / "broken.toml", source="test", date="2026-11-23")
    text = (tmp_path / "broken.toml").read_text()
    assert old in text
    _write(tmp_path, text.replace(old, new, 1))
    with pytest.raises(HardwareFileError, match=rf"broken\.toml: {message}"):
        Cluster.load(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("intra.bandwidth", "inf", "value=inf B/s; a number above 0, and at most"),
        ("intra.bandwidth", "nan", "value=nan B/s"),
        ("inter.bandwidth", "0", "value=0 B/s; a number above 0"),
        ("intra.latency", "-1e-6", "value=-1e-06 s; a number from 0 to 1e\\+06"),
        ("intra.latency", "1e7", "value=1e\\+07 s"),
        ("intra.efficiency", "0.0", "value=0 1; a number above 0"),
        ("matmul.tile_m", "0", "value=0 1; a number above 0"),
        ("memory_bytes", "1" + "0" * 400, "value=a number of more than 63 bits B"),
        ("inter.devices_per_nic", "0", "value=0 devices; a number above 0"),
        ("matmul.misaligned_slowdown", "0", "value=0 1; a number above 0"),
        ("attention.flash2.forward.block_queries", "0", "value=0 1; a number above 0"),
        ("attention_efficiency", "0", "value=0 1; a number above 0"),
    ],
)
def test_a_number_that_no_hardware_has_is_refused(tmp_path, path, value, message):
    """A number that is infinite, zero or not a number is refused with its constant and the allowed values."""
    Cluster("h100_sxm", 2).save(tmp_path / "broken.toml", source="test", date="2026-11-23")
    head, _, tail = (tmp_path / "broken.toml").read_text().partition(f"[{path}]\nvalue = ")
    _write(tmp_path, f"{head}[{path}]\nvalue = {value}\n{tail.partition(chr(10))[2]}")
    with pytest.raises(HardwareFileError, match=rf"broken\.toml: constant '{path}' has {message}"):
        Cluster.load(tmp_path / "broken.toml")


@pytest.mark.parametrize("path", ["matmul.units", "matmul.tile_n", "inter.devices_per_nic", "inter.nodes_per_pod"])
def test_a_part_of_a_device_is_refused(tmp_path, path):
    """A fraction as a count is refused."""
    Cluster("h100_sxm", 2).save(tmp_path / "broken.toml", source="test", date="2026-11-23")
    head, _, tail = (tmp_path / "broken.toml").read_text().partition(f"[{path}]\nvalue = ")
    _write(tmp_path, f"{head}[{path}]\nvalue = 0.5\n{tail.partition(chr(10))[2]}")
    with pytest.raises(HardwareFileError, match=rf"'{path}' has value=0\.5; a whole number"):
        Cluster.load(tmp_path / "broken.toml")


def test_more_devices_than_can_be_listed_are_refused():
    """A cluster of 2^20 devices is allowed, and more are refused."""
    assert Cluster("h100_sxm", 2**17).size == 2**20
    with pytest.raises(TopologyError, match="1000000000 nodes of 8 devices are too many; at most 1048576 devices"):
        Cluster("h100_sxm", 10**9)


def test_a_node_is_put_together_from_parts():
    """A node takes the device's usual fabric, its network's own latencies, and the caller's bandwidth."""
    node = assemble_node("a100_sxm_40gb", 8, network="omni_path", network_bytes_per_s_per_device=6.25e9)
    assert node.intra == node_type("a100_sxm_40gb").intra
    assert node.inter is not None
    assert node.inter.bandwidth_bytes_per_s == 6.25e9
    assert node.inter.latency_s == node_type("jean_zay_a100").inter.latency_s


def test_another_network_keeps_the_rest():
    """`with_network` changes the given fields alone, and takes a given `Link` as it is."""
    kind = node_type("h100_sxm")
    slower = kind.with_network(bytes_per_s_per_device=1e9, devices_per_nic=2, nodes_per_pod=4, oversubscription=2.0)
    assert slower.inter == dataclasses.replace(kind.inter, bandwidth_bytes_per_s=1e9)
    assert (slower.wiring.devices_per_nic, slower.wiring.nodes_per_pod, slower.wiring.oversubscription) == (2, 4, 2.0)
    assert (slower.device, slower.intra) == (kind.device, kind.intra)
    assert kind.with_network(slower.inter).inter == slower.inter
    assert kind.with_device("h200").device.name == "h200"


def test_a_cluster_is_counted_in_devices():
    """A cluster of a number of devices has whole nodes or part of one node, and other numbers are refused."""
    assert Cluster.of("h100_sxm", 16, devices_per_node=8, network="efa_v2").nodes == 2
    assert Cluster.of("h100_sxm", 4, devices_per_node=8).devices_per_node == 4
    with pytest.raises(TopologyError, match="12 devices do not fill nodes of 8"):
        Cluster.of("h100_sxm", 12, devices_per_node=8, network="efa_v2")


def test_missing_parts_are_named():
    """Changing a missing network, a device without a known fabric, and an unknown network are refused by name."""
    with pytest.raises(UnknownHardwareError, match=r"no network to change.*roce_v2"):
        node_type("rtx4090").with_network(bytes_per_s_per_device=1e9)
    mine = dataclasses.replace(device("h100_sxm"), name="mine")
    with pytest.raises(UnknownHardwareError, match=r"No fabric.*'mine'.*nvlink4_nvswitch"):
        assemble_node(mine, 8)
    with pytest.raises(UnknownHardwareError, match=r"'token_ring'.*infiniband_ndr400"):
        node_type("h100_sxm").with_network("token_ring")


def test_impossible_nodes_are_refused():
    """A cube mesh of sixteen devices, and a node without devices, are refused."""
    with pytest.raises(TopologyError, match="joins 8 devices, not 16"):
        assemble_node("v100_sxm2_32gb", 16, fabric="nvlink2_hybrid_cube_mesh")
    with pytest.raises(TopologyError, match="devices_per_node=0"):
        assemble_node("v100_sxm2_32gb", 0)


def test_an_unknown_layout_is_refused(tmp_path):
    """An unknown layout is refused with the known layouts."""
    Cluster("h100_sxm").save(tmp_path / "mine.toml", source="a test, nothing measured", date="2026-11-20")
    text = (tmp_path / "mine.toml").read_text().replace('layout = "switch"', 'layout = "donut"')
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(HardwareFileError, match=r"layout='donut'.*hybrid_cube_mesh"):
        Cluster.load(tmp_path / "mine.toml")


@pytest.mark.parametrize(
    ("gpu", "per_node", "fabric", "network", "gbit"),
    [
        ("a100_sxm_40gb", 8, None, "roce_v2", 200),
        ("a100_sxm_80gb", 8, None, "omni_path", 50),
        ("a100_sxm_80gb", 8, None, "infiniband_hdr200", 100),
        ("a100_sxm_80gb", 8, "nvlink3_nvswitch_a800", "infiniband_hdr200", None),
        ("v100_sxm2_32gb", 16, "nvlink2_nvswitch", "infiniband_edr100", 50),
        ("v100_sxm2_32gb", 4, "nvlink2_mesh", "omni_path", 100),
        ("b300", 8, None, "infiniband_xdr800", 800),
        ("gb200", 72, None, "infiniband_ndr400", 400),
        ("mi300x", 8, None, "roce_v2", 400),
    ],
)
def test_hardware_of_published_runs_can_be_built(gpu, per_node, fabric, network, gbit):
    """The hardware of each priced published run can be built, with links for all axes of a mesh."""
    speed = None if gbit is None else gbit / 8 * 1e9
    cluster = Cluster.of(
        gpu,
        4 * per_node,
        devices_per_node=per_node,
        fabric=fabric,
        network=network,
        network_bytes_per_s_per_device=speed,
    )
    links = axis_links(cluster, {"pipeline": 4, "data": per_node // 4, "model": 4})
    assert links["pipeline"].nodes == 4
    assert links["model"].intra is not None


@pytest.mark.parametrize("wrong", [{"devices_per_nic": 0}, {"nodes_per_pod": -1}, {"oversubscription": 0.5}])
def test_a_network_that_cannot_be_is_refused(wrong):
    """Each impossible field of a network is refused with its value."""
    with pytest.raises(TopologyError, match="at least 1, 0 and 1"):
        node_type("h100_sxm").with_network(**wrong)
