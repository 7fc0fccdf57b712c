"""Clusters in which one part is 10 % faster."""

from __future__ import annotations

import pytest

from cost_models.hardware import Cluster
from cost_models.step import ALONE
from passes.questions.faster_hardware import FASTER, MORE

LINKS, NETWORK = "10 % faster links in a node", "10 % faster network"


@pytest.mark.parametrize("shape", [{"data": 8}, {"others": 4, "data": 2}])
@pytest.mark.parametrize("node", ["h100_sxm", "h100_pcie", "dgx1_v100", "mi300x"])
def test_all_links_in_a_node_are_faster(node: str, shape: dict[str, int]) -> None:
    """With faster links in a node, bandwidth in the node rises by 10 %, over direct links and over the host's bus."""
    cluster = Cluster(node, 1, 8)
    faster = FASTER[LINKS](cluster)
    assert faster is not None
    before, after = (each.group_links(shape, ("data",)).intra for each in (cluster, faster))
    assert before is not None
    assert after is not None
    assert after.reached_bytes_per_s == pytest.approx(MORE * before.reached_bytes_per_s)


def test_the_slowdown_in_a_step_stays() -> None:
    """A faster network leaves a cluster without a slowdown in a step as it is."""
    cluster = Cluster("h100_sxm", 2, 8, ALONE)
    faster = FASTER[NETWORK](cluster)
    assert faster is not None
    assert faster.in_step == ALONE
