"""Layer profiles in PipeDream's text form: what is read, and what is said of bad ones."""

import pytest

from synchromesh.planning.layer_profile import load, parse, parse_csv
from tests.published import published


def node(name: str, description: str, *figures: object) -> str:
    names = ("forward_compute_time", "backward_compute_time", "activation_size", "parameter_size")
    pairs = ", ".join(f"{n}={x}" for n, x in zip(names, figures, strict=True))
    return f"{name} -- {description} -- {pairs}"


BRANCHES = "\n".join(
    [
        node("node4", "Add(inplace)", 0.0, 0.0, 8.0, 0.0),
        node("node2", "Conv2d(3, 4)", 1.5, 3.0, 8.0, 100.0),
        node("node1", "Input", 9.0, 0.0, 99.0, 0.0),
        node("node3", "Split()", 1.0, 1.0, "[2.0; 6.0]", 0.0),
        node("node10", "Linear(in_features=1, out_features=2, bias=True)", 2.0, 4.0, 24.0, 12.0),
        "\tnode1 -- node2",
        "\tnode2 -- node3",
        "\tnode2 -- node4",
        "\tnode3 -- node4",
        "\tnode4 -- node10",
    ]
)


def test_layers_come_in_the_order_in_which_they_can_run() -> None:
    made = parse(BRANCHES)
    assert [x.name for x in made.layers] == ["node2", "node3", "node4", "node10"]  # no input
    assert made.layers[0].forward(1.0) == 1.5e-3
    assert made.layers[1].value == 8.0  # a list: its sum
    assert made.layers[2].kept == 0.0  # written over its input
    assert made.readers == ((1, 2), (2,), (3,), ())
    assert made.rows == 3  # 24 bytes of 2 features


def test_values_cross_every_cut_up_to_their_last_reader() -> None:
    #                              node2 | node3 | node4 | node10
    assert parse(BRANCHES).over_cuts == (0.0, 8.0, 16.0, 8.0, 0.0)


ONE = node("a", "Conv2d()", 1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (f"{ONE}\nb -- ReLU", "line 2 is no layer"),
        (f"{ONE}\n{ONE}", "line 2: 'a' stands there twice"),
        (f"{ONE}\n\ta -> a", "line 2 should read `node1 -- node2`, not 'a -> a'"),
        (f"{ONE}\n\n\ta -- b", "line 3: there is no layer 'b'"),
        (ONE.replace("parameter_size=1.0", "size=1.0"), "line 1: parameter_size is missing"),
        (ONE.replace("parameter_size=1.0", "parameter_size=x"), "line 1: parameter_size=x is no"),
        (ONE.replace("parameter_size=1.0", "parameter_size=-1"), "line 1: parameter_size=-1 is"),
        (ONE.replace("parameter_size=1.0", "parameter_size=nan"), "line 1: parameter_size=nan is"),
        (f"{ONE}\n{ONE.replace('a --', 'b --', 1)}\n\ta -- b\n\tb -- a", "line 3: layers there"),
        (node("a", "Input", 1.0, 1.0, 1.0, 1.0), "line 1: there is no layer besides inputs"),
        ("", "line 1: there is no layer besides inputs"),
        (f"{ONE}\n" + ONE.replace("a --", "a b --", 1), "line 2: 'a b' is no name"),
    ],
)
def test_bad_files_get_their_line(text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=r"bad\.txt: ") as found:
        parse(text, "bad.txt")
    assert sentence in str(found.value)


def test_rows_are_not_guessed() -> None:
    assert parse(ONE).rows is None
    odd = node("a", "Linear(in_features=1, out_features=3)", 1.0, 1.0, 25.0, 1.0)
    assert parse(odd).rows is None


@pytest.mark.parametrize(
    ("name", "layers", "parameters"), [("vgg16", 40, 138_357_544), ("resnet50", 176, 25_557_032)]
)
def test_the_published_profiles(name: str, layers: int, parameters: int) -> None:
    made = load(published(f"pipedream/{name}.graph.txt"))
    assert (len(made.layers), made.rows) == (layers, 128)
    assert sum(x.parameters for x in made.layers) == 4 * parameters


TABLE = """component,rows,forward_seconds,backward_seconds,parameter_bytes,output_bytes
a,16,0.002,0.004,100,1000
a,32,0.003,0.006,100,2000
b,32,0.001,0.002,400,64
"""


def test_a_table_is_a_chain_with_lines_of_seconds() -> None:
    made = parse_csv(TABLE)
    assert [layer.name for layer in made.layers] == ["a", "b"] and made.readers == ((1,), ())
    assert made.rows == 32 and made.over_cuts == (0.0, 2000.0, 0.0)
    a, b = made.layers
    assert [a.forward(x) for x in (1.0, 0.5, 0.25)] == pytest.approx([0.003, 0.002, 0.0015])
    assert [b.backward(x) for x in (1.0, 0.5)] == pytest.approx([0.002, 0.001])
    assert (a.parameters, a.value, b.kept) == (100.0, 2000.0, 64.0)


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("component,rows", "name,rows", "line 1 should read `component,rows,"),
        ("0.002,0.004", "-1,0.004", "line 2 should have a name, rows from 1 and four numbers"),
        ("a,16", "a,0", "line 2 should have a name, rows from 1"),
        ("a,16", "a,32", "line 3: a with 32 rows stands twice"),
        ("b,32", "b,16", "b has no line with 32 rows, as others have"),
        (TABLE[TABLE.index("a,16") :], "", "line 1 should read .* with lines behind it"),
        (",64", ",64,7", "line 4 should have"),
    ],
)
def test_a_table_that_is_none_names_its_line(old: str, new: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        parse_csv(TABLE.replace(old, new))
