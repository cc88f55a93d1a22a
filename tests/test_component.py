"""Components and chains: bytes of values and parameters, edges that run forwards."""

import pytest

from synchromesh.component import Chain, Component, Edge, Parameter, Rows, Value


def test_bytes() -> None:
    value = Value("x", (2, 8), "float32", Rows(), True)
    assert value.bytes(3) == 3 * 2 * 8 * 4
    assert Value("mask", (8,), "bool", None, False).bytes(3) == 8
    weight = Parameter("fc.weight", (8, 4), "bfloat16")
    assert weight.bytes == 64
    assert Component("fc", (weight, Parameter("fc.bias", (8,), "float64"))).parameter_bytes == 128


def test_a_chain_has_its_names_in_order_and_edges_that_run_forwards() -> None:
    value = Value("x", (1,), "float32", Rows(), True)
    a, b = Component("a"), Component("b")
    chain = Chain((a, b), (Edge(value, None, ("a", "b")), Edge(value, "a", ("b",))))
    assert chain.names == ("a", "b")
    with pytest.raises(AssertionError, match="runs backwards"):
        Chain((a, b), (Edge(value, "b", ("a",)),))
    with pytest.raises(AssertionError, match="unique"):
        Chain((a, a))
