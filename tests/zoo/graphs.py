"""Networks on graphs, of torch_geometric."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tests.zoo.architecture import Architecture, Family, Inputs, Library, generator
from tests.zoo.inputs import MakeInputs, draw

NODES, EDGES, FEATURES, MOLECULES = 24, 64, 8, 4

NETWORK: dict[str, Any] = {"in_channels": FEATURES, "hidden_channels": 16, "num_layers": 2, "out_channels": 4}
CHANNELS = (FEATURES, 16, 4)


class Layers(nn.Module):
    """A network of graph convolutions with ReLU between them."""

    def __init__(self, convolutions: list[nn.Module]) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(convolutions)

    def forward(self, x: Tensor, edge_index: Tensor, **more: Tensor) -> Tensor:
        """The features of nodes after all convolutions, each of which also gets `more`."""
        for index, convolution in enumerate(self.convolutions):
            x = convolution(x.relu() if index else x, edge_index, **more)
        return x


def layers(convolution: str, **config: Any) -> Layers:
    """A network of one kind of convolution of torch_geometric."""
    kind = Library.GEOMETRIC.model(convolution)
    return Layers([kind(inner, outer, **config) for inner, outer in pairwise(CHANNELS)])


def even_layers(convolution: str, **config: Any) -> Layers:
    """A network of two convolutions that keep the number of channels."""
    kind = Library.GEOMETRIC.model(convolution)
    return Layers([kind(FEATURES, **config) for _ in range(2)])


def isomorphism_with_edges() -> Layers:
    """GINE: sums of neighbours and edges, through perceptrons."""
    perceptrons = [nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, FEATURES)) for _ in range(2)]
    return Layers([Library.GEOMETRIC.model("GINEConv")(perceptron, edge_dim=4) for perceptron in perceptrons])


def graph_transformer() -> Layers:
    """GPS: a graph convolution beside attention over all nodes of a graph."""
    inner = [Library.GEOMETRIC.model("GCNConv")(FEATURES, FEATURES) for _ in range(2)]
    kind = Library.GEOMETRIC.model("GPSConv")
    return Layers([kind(FEATURES, convolution, heads=2, norm="layer_norm") for convolution in inner])


def molecular(**config: Any) -> nn.Module:
    """SchNet with edges between all pairs of a molecule's atoms, because its own neighbour search needs a compiled
    extension (pyg_lib)."""
    return Library.GEOMETRIC.model("SchNet")(interaction_graph=_all_pairs, **config)


def _all_pairs(positions: Tensor, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Edges between all atoms of each molecule [2, edges], and their lengths."""
    atoms = NODES // MOLECULES
    first = torch.arange(MOLECULES).repeat_interleave(atoms * (atoms - 1)) * atoms
    pairs = torch.tensor([(i, j) for i in range(atoms) for j in range(atoms) if i != j]).T
    edges = pairs.repeat(1, MOLECULES) + first
    return edges, (positions[edges[0]] - positions[edges[1]]).norm(dim=-1)


def _edges() -> Tensor:
    """Edges [2, edges] without loops or repetitions."""
    pairs = torch.tensor([(i, j) for i in range(NODES) for j in range(NODES) if i != j])
    return pairs[torch.randperm(len(pairs), generator=generator())[:EDGES]].T.contiguous()


def _graph(**more: Callable[[], Any]) -> MakeInputs:
    """Return features of nodes and the edges between nodes."""
    return lambda model: {"x": draw(NODES, FEATURES), "edge_index": _edges(), **{key: it() for key, it in more.items()}}


def _batch() -> Tensor:
    """The number of the molecule to which each node belongs."""
    return torch.arange(MOLECULES).repeat_interleave(NODES // MOLECULES)


def _relations() -> Tensor:
    return torch.arange(EDGES) % 3


def _attributes() -> Tensor:
    return draw(EDGES, 4)


def _weights() -> Tensor:
    return draw(EDGES).abs()


def _atoms(model: nn.Module) -> Inputs:
    return {"z": torch.arange(NODES) % 10, "pos": draw(NODES, 3), "batch": _batch()}


def _network(name: str, model: Any, config: dict[str, Any], inputs: MakeInputs, **more: Any) -> Architecture:
    return Architecture(name, Family.GRAPH, model, config, inputs, library=Library.GEOMETRIC, **more)


GRAPHS = (
    _network("gcn", "GCN", NETWORK, _graph(edge_weight=_weights)),
    _network("gat", "GAT", {**NETWORK, "heads": 2}, _graph()),
    _network("gat-v2", "GAT", {**NETWORK, "heads": 2, "v2": True, "edge_dim": 4}, _graph(edge_attr=_attributes)),
    _network("graphsage", "GraphSAGE", NETWORK, _graph()),
    _network("gin-training", "GIN", NETWORK, _graph()),
    _network("pna", "PNA", {
        **NETWORK, "aggregators": ["mean", "min", "max", "std"], "scalers": ["identity", "amplification"],
        "deg": torch.tensor([2, 4, 8, 6, 4]),
    }, _graph()),
    _network("edge_cnn", "EdgeCNN", NETWORK, _graph()),
    _network("gcn-jumping", "GCN", {**NETWORK, "jk": "lstm", "norm": "graph_norm"}, _graph()),
    _network("graph_unet", "GraphUNet", {
        "in_channels": FEATURES, "hidden_channels": 16, "out_channels": 4, "depth": 2,
    }, _graph()),
    _network("rgcn", layers, {"convolution": "RGCNConv", "num_relations": 3, "num_bases": 2},
             _graph(edge_type=_relations)),
    _network("rgcn-fast", layers, {"convolution": "FastRGCNConv", "num_relations": 3}, _graph(edge_type=_relations)),
    _network("film", layers, {"convolution": "FiLMConv", "num_relations": 3}, _graph(edge_type=_relations)),
    _network("graph_transformer", layers, {
        "convolution": "TransformerConv", "heads": 2, "concat": False, "beta": True, "edge_dim": 4,
    }, _graph(edge_attr=_attributes)),
    _network("gps", graph_transformer, {}, _graph(batch=_batch)),
    _network("gen", layers, {"convolution": "GENConv", "learn_t": True, "edge_dim": 4}, _graph(edge_attr=_attributes)),
    _network("gine", isomorphism_with_edges, {}, _graph(edge_attr=_attributes)),
    _network("cgcnn", even_layers, {"convolution": "CGConv", "dim": 4}, _graph(edge_attr=_attributes)),
    _network("chebyshev", layers, {"convolution": "ChebConv", "K": 3}, _graph()),
    _network("arma", layers, {"convolution": "ARMAConv", "num_stacks": 2, "num_layers": 2}, _graph()),
    _network("gated_graph", even_layers, {"convolution": "GatedGraphConv", "num_layers": 2}, _graph()),
    _network("attentive_fp", "AttentiveFP", {
        "in_channels": FEATURES, "hidden_channels": 16, "out_channels": 4, "edge_dim": 4, "num_layers": 2,
        "num_timesteps": 2,
    }, _graph(edge_attr=_attributes, batch=_batch)),
    _network("linkx", "LINKX", {**NETWORK, "num_nodes": NODES}, _graph()),
    _network("schnet", molecular, {
        "hidden_channels": 16, "num_filters": 16, "num_interactions": 2, "num_gaussians": 8, "cutoff": 4.0,
    }, _atoms),
)  # fmt: skip
