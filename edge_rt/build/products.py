"""Which W4Linears of a decoder graph an engine computes in one product.

Those that read the same activation, and those whose outputs are only added to each other: with
GPT-J's parallel block that leaves two products a layer instead of four.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx
from onnx import helper

from edge_rt.quant.fuse import can_join, can_stack, join, stack
from edge_rt.quant.pack import QuantizedLinear

OP = "W4Linear"

Load = Callable[[onnx.NodeProto], QuantizedLinear]


@dataclass(frozen=True, slots=True)
class Product:
    """One product for `nodes`.

    `total` is the node that adds their outputs, at whose place it is computed, and nothing reads
    these but it; if there is none, they read the same input, and the first is the place.
    """

    nodes: tuple[onnx.NodeProto, ...]
    in_features: tuple[int, ...]
    total: onnx.NodeProto | None = None

    def load(self, load: Load) -> QuantizedLinear:
        """The linear of the whole product."""
        linears = [load(node) for node in self.nodes]
        return stack(linears) if self.total is None else join(linears, self.in_features)


class Products:
    """The products of a graph; `load` gives a node's linear, `widths` an activation's features."""

    def __init__(self, graph: onnx.GraphProto, load: Load, widths: Mapping[str, int]) -> None:
        self._load, self._widths = load, widths
        self._readers: dict[str, list[onnx.NodeProto]] = {}
        for node in graph.node:
            for name in node.input:
                self._readers.setdefault(name, []).append(node)
        makers = {name: node for node in graph.node for name in node.output}
        self._at: dict[str, Product] = {}
        self._covered: set[str] = set()
        for node in graph.node:
            if node.op_type == "Add":
                self._add_total(node, [makers[name] for name in node.input if name in makers])
        for node in graph.node:
            if node.op_type == OP and node.name not in self._covered:
                for product in self._of_input(node):
                    self._cover(product)

    def at(self, node: onnx.NodeProto) -> Product | None:
        """The product that is computed at the place of `node`."""
        return self._at.get(node.name)

    def covers(self, node: onnx.NodeProto) -> bool:
        """Whether a product stands for `node`, here or elsewhere."""
        return node.name in self._covered

    def _cover(self, product: Product) -> None:
        self._at[(product.total or product.nodes[0]).name] = product
        self._covered.update(node.name for node in product.nodes)
        if product.total is not None:
            self._covered.add(product.total.name)

    def _add_total(self, node: onnx.NodeProto, terms: Sequence[onnx.NodeProto]) -> None:
        if len(terms) != len(node.input):
            return
        if not all(self._is_only_added(term) for term in terms):
            return
        features = tuple(self._widths[term.input[0]] for term in terms)
        if can_join([self._load(term) for term in terms], features):
            self._cover(Product(tuple(terms), features, node))

    def _is_only_added(self, node: onnx.NodeProto) -> bool:
        if node.op_type != OP or len(self._readers[node.output[0]]) > 1:
            return False
        return attribute(node, "gelu_from") == -1

    def _of_input(self, node: onnx.NodeProto) -> Iterator[Product]:
        name = node.input[0]
        nodes = [
            one
            for one in self._readers[name]
            if one.op_type == OP and one.name not in self._covered
        ]
        features = (self._widths[name],)
        if can_stack([self._load(one) for one in nodes]):
            yield Product(tuple(nodes), features)
        else:
            yield from (Product((one,), features) for one in nodes)


def attribute(node: onnx.NodeProto, name: str) -> Any:
    """An attribute of a node that has it."""
    return next(helper.get_attribute_value(a) for a in node.attribute if a.name == name)
