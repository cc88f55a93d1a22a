"""Components and chains: bytes of values and parameters, edges that run forwards."""

import re

import pytest
import torch

from synchromesh.values.component import ITEM_BYTES, Chain, Component, Edge, Parameter, Rows, Value


def test_bytes() -> None:
    value = Value("x", (2, 8), "float32", Rows(), True)
    assert value.bytes(3) == 3 * 2 * 8 * 4
    assert Value("mask", (8,), "bool", None, False).bytes(3) == 8
    weight = Parameter("fc.weight", (8, 4), "bfloat16")
    assert weight.bytes == 64
    assert Component("fc", (weight, Parameter("fc.bias", (8,), "float64"))).parameter_bytes == 128


def test_every_type_of_a_tensor_has_its_size() -> None:
    types = {t for t in vars(torch).values() if isinstance(t, torch.dtype)}
    packed = re.compile(r"bits|q|float4|u?int[1-7]$")  # several entries in a byte, or quantised
    known = {str(t).removeprefix("torch."): t.itemsize for t in types}
    assert {n: size for n, size in known.items() if not packed.match(n)} == ITEM_BYTES


def test_a_chain_has_its_names_in_order_and_edges_that_run_forwards() -> None:
    value = Value("x", (1,), "float32", Rows(), True)
    a, b = Component("a"), Component("b")
    chain = Chain((a, b), (Edge(value, None, ("a", "b")), Edge(value, "a", ("b",))))
    assert chain.names == ("a", "b")
    with pytest.raises(AssertionError, match="runs backwards"):
        Chain((a, b), (Edge(value, "b", ("a",)),))
    with pytest.raises(AssertionError, match="unique"):
        Chain((a, a))
