"""tests cost_models/hardware.py, cost_models/topology.py, cost_models/constants.py."""

import datetime
import math

import networkx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cost_models import constants
from cost_models.errors import HardwareFileError, TopologyError, UnknownHardwareError
from cost_models.hardware import Cluster, device, node_type

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
    """Node files name a known device; efficiencies are fractions."""
    kind = node_type(name)
    assert kind.name == name
    for share in (*kind.device.matmul.efficiency.values(), kind.device.memory_efficiency, kind.intra.efficiency):
        assert 0 < share <= 1
    assert set(kind.device.matmul.efficiency) == set(kind.device.peak_flops)


@pytest.mark.parametrize("name", constants.names("nodes"))
def test_a_cluster_survives_save_and_load(name, tmp_path):
    """TOML round trip, equal field by field."""
    nodes = 4 if node_type(name).inter else 1
    cluster = Cluster(name, nodes=nodes, devices_per_node=1)
    cluster.save(tmp_path / "mine.toml", source="a test", date="2026-11-20")
    assert Cluster.load(tmp_path / "mine.toml") == cluster


def test_unknown_hardware_names_what_is_known_and_how_to_add():
    """The message lists the files and where a new one goes."""
    with pytest.raises(UnknownHardwareError, match=r"'h900'.*h100_sxm.*data/nodes/h900\.toml"):
        Cluster("h900")


def test_unknown_dtype_of_a_known_device_raises():
    """An A100 has no fp8; nothing is assumed."""
    with pytest.raises(UnknownHardwareError, match=r"peak_flops\.f8"):
        device("a100_sxm_80gb").peak("f8")


def test_several_nodes_without_a_network_raise():
    """A laptop has no inter-node link."""
    with pytest.raises(UnknownHardwareError, match="no network"):
        Cluster("cpu_laptop", nodes=2)


def test_too_many_devices_per_node_raise():
    """A node holds what its file says."""
    with pytest.raises(TopologyError, match="1 to 8 devices"):
        Cluster("h100_sxm", nodes=1, devices_per_node=9)


def test_a_mesh_larger_than_the_cluster_raises():
    """16 ranks do not fit on 8 devices."""
    with pytest.raises(TopologyError, match="more ranks"):
        Cluster("h100_sxm").axis_links({"data": 16})


def test_an_unknown_axis_raises():
    """The axis is named."""
    with pytest.raises(TopologyError, match="no axis 'model'"):
        Cluster("h100_sxm").group_links({"data": 8}, ("model",))


def test_axis_links_on_two_levels():
    """2 x 8 x 4 ranks on nodes of 8: pipeline across nodes, data on both levels, tensor inside."""
    links = Cluster("h100_sxm", nodes=8, devices_per_node=8).axis_links({"pp": 2, "dp": 8, "tp": 4})
    assert {axis: (g.size, g.per_node, g.nodes) for axis, g in links.items()} == {
        "pp": (2, 1, 2),
        "dp": (8, 2, 4),
        "tp": (4, 4, 1),
    }
    assert links["pp"].intra is None
    assert links["tp"].inter is None


def test_joint_groups_span_the_product_of_axes():
    """A reshard over (pp, tp) uses both levels."""
    links = Cluster("h100_sxm", nodes=8).group_links({"pp": 2, "dp": 8, "tp": 4}, ("pp", "tp"))
    assert (links.size, links.per_node, links.nodes) == (8, 4, 2)


def test_uneven_groups_count_as_a_flat_ring():
    """Three ranks on nodes of two: the network bounds the whole ring."""
    links = Cluster("h100_sxm", nodes=3, devices_per_node=2).group_links({"data": 2, "model": 3}, ("model",))
    assert (links.size, links.per_node, links.nodes, links.intra) == (3, 1, 3, None)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.sampled_from([1, 2, 4, 8]))
def test_group_sizes_multiply_to_the_mesh(sizes, per_node):
    """Each axis' group has its size, and per_node * nodes members."""
    mesh = {f"axis{index}": size for index, size in enumerate(sizes)}
    nodes = -(-math.prod(sizes) // per_node)
    for axis, links in Cluster("h100_sxm", nodes=nodes, devices_per_node=per_node).axis_links(mesh).items():
        assert links.size == mesh[axis] == links.per_node * links.nodes


def test_the_topology_is_connected():
    """Devices hang on node switches and network cards, cards on the spine."""
    graph = Cluster("h100_sxm", nodes=4, devices_per_node=8).topology()
    assert networkx.is_connected(graph)
    reached = node_type("h100_sxm").intra.reached_bytes_per_s
    assert graph.edges[("device", 9), ("switch", 1)]["bytes_per_s"] == reached


def _write(tmp_path, text):
    path = tmp_path / "broken.toml"
    path.write_text(text)
    return path


def test_a_constant_without_source_is_refused(tmp_path):
    """The message names the constant and what it lacks."""
    path = _write(tmp_path, '[memory_bytes]\nvalue = 1\nunit = "B"\ndate = "2026-01-01"\n')
    with pytest.raises(HardwareFileError, match="'memory_bytes' lacks source"):
        constants.read(path)


def test_a_constant_in_another_unit_is_refused(tmp_path):
    """GB where bytes are read is an error."""
    path = _write(tmp_path, '[memory_bytes]\nvalue = 1\nunit = "GB"\nsource = "x"\ndate = "2026-01-01"\n')
    with pytest.raises(HardwareFileError, match="unit='GB'"):
        constants.read(path).number("memory_bytes", "B")


def test_a_missing_constant_is_named(tmp_path):
    """The message says which table to add."""
    with pytest.raises(HardwareFileError, match=r"\[intra\.bandwidth\]"):
        constants.read(_write(tmp_path, "")).number("intra.bandwidth", "B/s")


def test_a_file_that_is_no_toml_is_refused(tmp_path):
    """The path is in the message."""
    with pytest.raises(HardwareFileError, match=r"broken\.toml: not a TOML file"):
        constants.read(_write(tmp_path, "= 1"))
