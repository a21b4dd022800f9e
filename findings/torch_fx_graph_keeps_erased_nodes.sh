#!/usr/bin/env bash
# torch 2.13.0: a torch.fx graph keeps every node that was erased from it, and with the node all that its `meta` holds.
#
# One would expect that `erase_node` and `eliminate_dead_code` let a node go, and its values with it: nothing of the graph can reach it
# any more. But the graph's namespace notes the name of each node by the node, for as long as the graph lives (`_graph_namespace`,
# `_obj_to_name`). Passes that put tensors into `meta` and rewrite keep them all: of a UNet that may be most of its weights.
#
# Seen: node and values are alive after `erase_node`, after `eliminate_dead_code`, and when a GraphModule was made of the graph (the
# module has a copy, the graph itself still keeps them); both go with the graph. Without the entry in `_obj_to_name` they go at once.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/python" -m pip install -q --disable-pip-version-check torch==2.13.0 numpy==2.2.6
"$folder/venv/bin/python" -W ignore - <<'PYTHON'
import gc
import weakref

import torch
from torch import fx


class Values:
    """Stands for tensors."""


def seen(remove):
    """Whether node and values are alive: after the node was removed, and after the graph is gone."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    node = graph.call_function(torch.neg, (x,))
    node.meta["values"] = Values()
    graph.output(x)
    alive = weakref.ref(node), weakref.ref(node.meta["values"])
    remove(graph, node)
    assert node not in graph.nodes
    del node, x
    gc.collect()
    after = tuple(each() is not None for each in alive)
    del graph
    gc.collect()
    return after, tuple(each() is not None for each in alive)


def without_name(graph, node):
    graph.erase_node(node)
    del graph._graph_namespace._obj_to_name[node]


def as_module(graph, node):
    graph.erase_node(node)
    fx.GraphModule(torch.nn.Module(), graph)


found = {
    "erase_node": seen(lambda graph, node: graph.erase_node(node)),
    "eliminate_dead_code": seen(lambda graph, node: graph.eliminate_dead_code()),
    "erase_node, and a GraphModule": seen(as_module),
    "erase_node, without the entry": seen(without_name),
}
for way, (after, gone) in found.items():
    print(f"{way}: node and values alive {after}, without the graph {gone}")
kept, freed = ((True, True), (False, False)), ((False, False), (False, False))
assert found.pop("erase_node, without the entry") == freed
assert set(found.values()) == {kept}
PYTHON
