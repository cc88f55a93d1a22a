"""Compression: which parameters, by what, and how many bytes that takes."""

import pytest

from synchromesh.values.component import Parameter
from synchromesh.values.compression import CompressedSizes, assigned, low_rank, matrix, refuse_rank
from synchromesh.values.holding import compressed_sizes, holdings
from synchromesh.values.layout import Layout
from synchromesh.values.placement import REPLICATED, shard
from synchromesh.values.plan import Plan

NAMES = ("body.0.weight", "body.0.bias", "body.10.weight", "head.weight", "scale")
OF = {name: ((8, 4), "float32") for name in NAMES}


def words(text: str) -> dict[str, str]:
    return assigned(text, OF)


def test_the_first_pattern_that_matches_counts() -> None:
    assert words("none") == {}
    assert words("int8") == dict.fromkeys(NAMES, "int8")
    assert words("head:powersgd:2,*:int8") == words("int8") | {"head.weight": "powersgd:2"}
    assert words("*:int8,head:powersgd:2") == words("int8")
    assert list(words("body.0-9:onebit")) == ["body.0.weight", "body.0.bias"]
    assert list(words("*.weight:topk:0.1")) == [n for n in NAMES if n.endswith("weight")]


def test_a_pattern_without_match_is_an_error() -> None:
    with pytest.raises(ValueError, match="'haed' matches no parameter that is trained; did you"):
        words("haed:int8,*:fp16")


@pytest.mark.parametrize(
    ("dtype", "word", "compressed"),
    [
        ("float64", "fp16", True),
        ("bfloat16", "fp16", False),  # as short already
        ("bfloat16", "int8", True),
        ("complex64", "int8", False),
    ],
)
def test_what_has_no_shorter_form_is_sent_whole(dtype: str, word: str, compressed: bool) -> None:
    assert assigned(word, {"a": ((9, 9), dtype)}) == ({"a": word} if compressed else {})


def test_a_rank_that_shortens_nothing_is_refused() -> None:
    refuse_rank([("powersgd:6", (100, 7)), ("powersgd:6", (10,)), ("int8", (3, 3))])
    with pytest.raises(
        ValueError, match=r"7 \(100 \+ 7\) = 749 numbers are not fewer than the 700.*at most 6"
    ):
        refuse_rank([("powersgd:7", (100, 7)), ("powersgd:7", (2, 2))])
    with pytest.raises(ValueError, match="leave it out, or take int8"):
        refuse_rank([("powersgd:1", (10,))])


def test_tensors_are_matrices_of_their_first_dimension() -> None:
    assert matrix((8, 3, 5, 5)) == (8, 75)
    assert matrix((8,)) == (8, 1) and matrix(()) == (1, 1)
    assert low_rank((8, 3, 5, 5), 4) and not low_rank((8,), 1) and not low_rank((4, 4), 2)


SHAPES = ((30, 20), (30,), ())  # 631 numbers


@pytest.mark.parametrize(
    ("word", "ranks", "payloads", "kept"),
    [
        # 316 numbers a rank
        ("fp16", 2, [("all_to_all", 1264), ("all_gather", 1264)], 4 * 3 * 316),
        # 2 blocks of 256 a rank: 520 bytes
        ("int8", 2, [("all_to_all", 1040), ("all_gather", 1040)], 4 * 3 * 512),
        ("int8", 3, [("all_to_all", 780), ("all_gather", 780)], 4 * 4 * 256),
        # 64 bytes of signs, 8 of scales
        ("onebit", 2, [("all_to_all", 144), ("all_gather", 144)], 4 * 3 * 512),
        ("topk:0.01", 3, [("all_gather", 3 * 7 * 8)], 4 * 631),
        ("topk:1", 2, [("all_gather", 2 * 631 * 8)], 4 * 631),
        # 2 (30 + 20) of the matrix, 31 whole
        ("powersgd:2", 4, [("all_reduce", 364), ("all_reduce", 160)], 4 * (631 + 2 * 40)),
        ("powersgd:20", 4, [("all_reduce", 4 * 631)], 4 * 631),
    ],
)
def test_bytes_of_a_bucket(word: str, ranks: int, payloads: list[object], kept: int) -> None:
    sizes = CompressedSizes.of(word, SHAPES, "float32", ranks)
    assert [*sizes.payloads] == payloads
    assert sizes.state_bytes == kept


def test_copies_on_tensor_ranks_have_one_sum() -> None:
    tensors = [Parameter("cut.weight", (8, 6), "float32"), Parameter("norm", (8,), "float32")]
    layout = Layout(2, 2)
    placed = {("cut.weight", layout): shard(0), ("norm", layout): REPLICATED}
    whole = holdings(tensors, placed, 4)
    held = holdings(tensors, placed, 4, Plan.parse("data; @compression=powersgd:1"))
    assert [len(h.gradient_positions(0)) for h in whole.values()] == [2, 2]
    assert [len(h.gradient_positions(0)) for h in held.values()] == [2, 4]
    assert compressed_sizes([held["cut.weight"]]).shapes == ((4, 6),)
    assert compressed_sizes([held["norm"]], 3).shapes == ((8,),)
