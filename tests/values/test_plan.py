"""A plan: its text, JSON and YAML forms, its meaning for components and rows, errors."""

import dataclasses
import itertools
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from synchromesh.values.layout import Layout
from synchromesh.values.layout_spec import STATES, LayoutSpec
from synchromesh.values.plan import SCHEDULES, Override, Plan, Stage
from synchromesh.values.plan_item import matches
from synchromesh.values.synchronisation import synchronisation
from synchromesh.values.unsupported import unsupported

NAMES = (
    "embeddings", "encoder.layer.0.attention", "encoder.layer.0.mlp", "encoder.layer.1.attention",
    "encoder.layer.1.mlp", "classifier",
)  # fmt: skip


def shown(text: str, world: int, modules: dict[str, tuple[str, ...]] | None = None) -> str:
    return " ".join(map(str, Plan.parse(text).layouts(NAMES, world, modules)))


@pytest.mark.parametrize(
    ("text", "world", "layouts"),
    [
        ("single", 4, "1x1 1x1 1x1 1x1 1x1 1x1"),
        ("data", 4, "4x1 4x1 4x1 4x1 4x1 4x1"),
        ("tensor", 4, "1x4 1x4 1x4 1x4 1x4 1x4"),
        ("hybrid:tensor=2", 4, "2x2 2x2 2x2 2x2 2x2 2x2"),
        ("hybrid:data=2", 8, "2x4 2x4 2x4 2x4 2x4 2x4"),
        ("data; classifier=tensor", 4, "4x1 4x1 4x1 4x1 4x1 1x4"),
        ("data; encoder.layer.*=hybrid:tensor=2", 4, "4x1 2x2 2x2 2x2 2x2 4x1"),
        ("data; encoder=tensor; *.mlp=hybrid:tensor=2", 4, "4x1 1x4 2x2 1x4 2x2 4x1"),
        ("data; *.mlp=hybrid:tensor=2; encoder=tensor", 4, "4x1 1x4 1x4 1x4 1x4 4x1"),
        ("tensor; encoder.layer.[0]=data", 4, "1x4 4x1 4x1 1x4 1x4 1x4"),
        ("data; encoder.layer.0-1.mlp=tensor", 4, "4x1 4x1 1x4 4x1 1x4 4x1"),
        ("data; encoder.layer.1-7=tensor", 4, "4x1 4x1 4x1 1x4 1x4 4x1"),
        ("data; encoder.layer.0-1=tensor; *.0-0.mlp=data", 4, "4x1 1x4 4x1 1x4 1x4 4x1"),
        ("data; @ranks=2,0,3", 4, "3x1 3x1 3x1 3x1 3x1 3x1"),
        ("tensor; @stages=0-2:embeddings/3:classifier", 4, "1x3 1x3 1x3 1x3 1x3 1x1@3"),
        (
            "data; encoder.layer.1.*=tensor; @stages=3,1:embeddings/0,2:encoder.layer.1",
            4,
            "2x1 2x1 2x1 1x2@2 1x2@2 2x1@2",
        ),
        (
            "data; @stages=0:embeddings/1:encoder/0:encoder.layer.1/1:classifier",
            2,
            "1x1 1x1@1 1x1@1 1x1 1x1 1x1@1",
        ),
    ],
)
def test_layouts(text: str, world: int, layouts: str) -> None:
    assert shown(text, world) == layouts


def test_a_pattern_may_name_a_module_inside_a_component() -> None:
    modules = {"classifier": ("classifier", "classifier.dense", "norm")}
    assert shown("data; norm=tensor", 2, modules) == "2x1 2x1 2x1 2x1 2x1 1x2"


@pytest.mark.parametrize(
    ("pattern", "path", "hit"),
    [
        ("a.4-17.b", "a.4.b", True),
        ("a.4-17.b", "a.17.b", True),
        ("a.4-17.b", "a.3.b", False),
        ("a.4-17.b", "a.18.b", False),
        ("a.4-17.b", "a.04.b", False),  # is no number of a list, but a name
        ("a.4-17.b", "a.4.c.b", False),
        ("a.4-17", "a.5.b", False),  # of which a component is inside: `around` has a.5
        ("4-17", "10", True),
        ("4-17.x", "a.10.x", False),
        ("*.4-17.*", "a.1.b.5.c", True),  # the first number is none of them, the second is
        ("*.2-3.*.5-6.x", "a.2.b.9.c.2.d.6.x", True),
        ("*.2-3.*.5-6.x", "a.6.b.2.x", False),
        ("a.4-17b", "a.4-17b", True),  # no part of a path on its own: a name
        ("a.[4]-17", "a.4-17", True),
        ("a.4-17", "a.4-17", False),
        ("a.?-9", "a.3-9", True),
        ("a.0-999999999.b", "a.123456789.b", True),
        ("a.0-9999999999", "a.0-9999999999", True),  # more digits than a number of a list has
    ],
)
def test_ranges_of_numbers_in_a_path(pattern: str, path: str, hit: bool) -> None:
    assert matches(pattern, path) == hit


@given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 40))
def test_a_range_matches_what_its_numbers_match(first: int, last: int, number: int) -> None:
    pattern, path = f"*.{first}-{last}.?", f"b.{number}.{number % 10}.c"
    numbers = [f"*.{n}.?" for n in range(first, last + 1)]
    assert matches(pattern, path) == any(matches(p, path) for p in numbers)


def test_states_and_recomputation_reach_the_layout() -> None:
    plan = Plan.parse("sharded-data:recompute=yes; classifier=hybrid:tensor=2,states=optimizer")
    first, *_, last = plan.layouts(NAMES, 4)
    assert first == Layout(4, 1, "parameters", recompute=True)
    assert last == Layout(2, 2, "optimizer")


def test_cuts_are_the_outermost_modules_a_pattern_names() -> None:
    modules = ["", "encoder", "encoder.0", "encoder.0.q", "encoder.1", "encoder.1.q", "head"]
    assert Plan.parse("data; encoder.*=tensor").cuts(modules) == ("encoder.0", "encoder.1")
    assert Plan.parse("data; *.q=tensor; head=tensor").cuts(modules) == (
        "encoder.0.q", "encoder.1.q", "head",
    )  # fmt: skip
    assert Plan.parse("data; encoder.1-3=tensor").cuts(modules) == ("encoder.1",)
    assert Plan.parse("data; encoder.0-3.q=tensor").cuts(modules) == ("encoder.0.q", "encoder.1.q")
    assert Plan.parse("data").cuts(modules) == ()


def test_devices() -> None:
    assert Plan.parse("data").devices(3) == (0, 1, 2)
    assert Plan.parse("single").devices(3) == (0,)
    assert Plan.parse("single; @ranks=2").devices(3) == (2,)
    assert Plan.parse("data; @ranks=2,0").devices(3) == (2, 0)
    assert Plan.parse("data; @stages=3,1:a/0:b").devices(4) == (3, 1, 0)
    with pytest.raises(ValueError, match=r"rank 5, but there are 4 ranks \(0 to 3\)"):
        Plan.parse("data; @ranks=0,5").devices(4)


# Rows


def test_row_ranges_as_a_picture() -> None:
    plan = Plan.parse("data")
    assert [rows_of(plan, 10, d) for d in (1, 2, 4)] == [
        "0 1 2 3 4 5 6 7 8 9",
        "0 1 2 3 4 | 5 6 7 8 9",
        "0 1 2 | 3 4 | 5 6 7 | 8 9",
    ]
    assert rows_of(plan, 2, 4) == "0 |  | 1 | "
    assert rows_of(plan, 1, 3) == "0 |  | "
    served = Plan.parse("data; @synchronisation=server:2; @servers=4,0")
    assert rows_of(served, 5, 4) == " |  | 0 1 2 | 3 4" and served.devices(4 + 1) == (
        4,
        0,
        1,
        2,
        3,
    )
    assert rows_of(dataclasses.replace(served, rows=(3, 1)), 8, 4) == " |  | 0 1 2 3 4 5 | 6 7"
    assert rows_of(Plan.parse("data; @rows=3,3,2"), 8, 3) == "0 1 2 | 3 4 5 | 6 7"
    assert rows_of(Plan.parse("data; @rows=3,1,2,2"), 8, 2) == "0 1 2 3 | 4 5 6 7"


def rows_of(plan: Plan, rows: int, data: int) -> str:
    return " | ".join(" ".join(map(str, range(a, b))) for a, b in plan.row_ranges(rows, data))


@given(
    st.integers(0, 300),
    st.integers(1, 12),
    st.integers(1, 4),
    st.one_of(st.none(), st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(any)),
)
def test_laws_of_row_ranges(rows: int, data: int, times: int, shares: list[int] | None) -> None:
    plan = Plan(LayoutSpec("data"), rows=tuple(shares) if shares else None)
    ranges = plan.row_ranges(rows, data)
    ends = [ranges[0][0], *(stop for _, stop in ranges)]
    assert ends[0] == 0 and ends[-1] == rows and ends == sorted(ends)
    assert all(a == b for (_, a), (b, _) in itertools.pairwise(ranges))
    finer = {stop for _, stop in plan.row_ranges(rows, data * times)}
    assert set(ends[1:]) <= finer, "ranges are unions of those of a multiple of the degree"
    if shares is None:
        sizes = [b - a for a, b in ranges]
        assert max(sizes) - min(sizes) <= 1 and sizes[0] == max(sizes)
    elif len(shares) == data:
        for (a, b), share in zip(ranges, shares, strict=True):
            assert abs((b - a) - rows * share / sum(shares)) < 1


# Forms


specs = st.one_of(
    st.sampled_from([LayoutSpec("data"), LayoutSpec("tensor", recompute=True)]),
    st.builds(
        LayoutSpec,
        st.just("hybrid"),
        tensor=st.integers(1, 8),
        data=st.one_of(st.none(), st.integers(1, 8)),
        states=st.sampled_from(STATES),
        recompute=st.booleans(),
    ),
    st.builds(LayoutSpec, st.just("sharded-data"), states=st.sampled_from(STATES)),
)
defaults = st.one_of(
    specs,
    st.sampled_from([LayoutSpec("single"), LayoutSpec("auto")]),
    st.builds(LayoutSpec, st.just("pipeline"), stages=st.integers(1, 4), data=st.integers(1, 3)),
)
patterns = st.one_of(
    st.text("ab.*?[]0_-:,/@", min_size=1, max_size=8).filter(lambda t: t[0] != "@"),
    st.sampled_from(["a.4-17", "4-17.*.b", "*.0-0.2-31", "a.04-5"]),
)
ranks = st.lists(st.integers(0, 30), min_size=1, max_size=9, unique=True).map(tuple)
stages = st.lists(ranks, min_size=1, max_size=3).filter(
    lambda s: len({r for x in s for r in x}) == sum(map(len, s))
)


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    default = draw(defaults)
    explicit = default.name != "pipeline" and draw(st.booleans())
    made = [Stage(r, f"b{i}") for i, r in enumerate(draw(stages))] if explicit else []
    words = ["every-step", "local:8", "stale:2", "server:2", "ssp:1,stale=3"]
    word = draw(st.sampled_from(words))
    count = synchronisation(word).servers
    servers = draw(st.lists(st.integers(0, 30), min_size=count, max_size=count, unique=True))
    return Plan(
        default,
        tuple(draw(st.lists(st.builds(Override, patterns, specs), max_size=3))),
        tuple(made),
        draw(st.integers(1, 9)),
        draw(st.sampled_from(SCHEDULES)),
        draw(st.one_of(st.none(), st.integers(1, 999))),
        word,
        draw(st.one_of(st.none(), st.just((3, 0, 2)))),
        None if explicit else draw(st.one_of(st.none(), ranks)),
        draw(st.one_of(st.none(), st.integers(1, 2**31))),
        draw(st.sampled_from(["none", "int8", "a.*:powersgd:4,*:topk:0.010"])),
        tuple(servers) or None,
    )


@settings(max_examples=120, deadline=None)
@given(plans())
def test_every_plan_survives_its_forms(plan: Plan) -> None:
    assert Plan.parse(str(plan)) == plan and "\n" not in str(plan)
    assert str(Plan.parse(str(plan))) == str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("hybrid:tensor=1", "data"),
        ("hybrid:data=1", "tensor"),
        ("data:states=gradients", "zero2"),
        ("sharded-data:states=optimizer,recompute=yes", "zero1:recompute=yes"),
        ("zero3", "sharded-data"),
        ("sharded-data:states=parameters", "sharded-data"),
        (" data ;a = tensor; @ranks= 0,1,2,3,7 ", "data; a=tensor; @ranks=0-3,7"),
        ("pipeline:stages=2; @micro_batches=4", "pipeline:stages=2,microbatches=4"),
        ("data; @synchronisation=every-step", "data"),
        ("data; @compression=none", "data"),
        ("data; @compression=*:int8; @rows=3,1", "data; @compression=int8; @rows=3,1"),
        ("data; @compression= a : topk:.50,onebit", "data; @compression=a:topk:0.5,*:onebit"),
        ("data; @schedule=1f1b; @micro_batches=1", "data"),
        ("tensor; @pieces= 04; a=data", "tensor; a=data; @pieces=4"),
        ("data; @pieces=1; @rows=3,1", "data; @rows=3,1; @pieces=1"),  # whole: nothing is tried
    ],
)
def test_canonical_text(text: str, canonical: str) -> None:
    assert str(Plan.parse(text)) == canonical
    assert Plan.parse(text) == Plan.parse(canonical)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("data", 1),
        ("zero1; @pieces=4", 1),
        ("sharded-data:recompute=yes", 3),
        ("hybrid:tensor=2,states=optimizer", 5),
        ("data; head=tensor", 3),
        ("data; model.layers.4-17.mlp=hybrid:tensor=2", 5),
        ("data; @stages=0-3:a/4-7:b; @micro_batches=4", 8),
    ],
)
def test_words_of_a_plan(text: str, words: int) -> None:
    assert Plan.parse(text).words == words


def test_pieces_that_are_not_given_are_not_written() -> None:
    tried, single = Plan.parse("data"), Plan.parse("data; @pieces=1")
    assert tried.pieces is None and single.pieces == 1 and tried != single
    assert Plan.from_json('{"default": "data", "pieces": null}') == tried
    assert "pieces" not in tried.to_dict() and single.to_dict()["pieces"] == 1
    assert unsupported(single) == ()
    with_interleaving = Plan.parse(
        "auto; @pieces=4"
    )  # what the planner finds says its pieces itself
    assert (
        not with_interleaving.automatic and "write it alone" in unsupported(with_interleaving)[0]
    )


def test_files(tmp_path: Path) -> None:
    plan = Plan.parse("data; head=hybrid:tensor=2; @rows=3,3")
    (tmp_path / "p.yaml").write_text(plan.to_yaml())
    (tmp_path / "p.json").write_text(plan.to_json())
    assert Plan.load(tmp_path / "p.yaml") == Plan.load(str(tmp_path / "p.json")) == plan
    for name, message in [
        ("none.yaml", "No such file"),
        ("p.txt", r"should end in \.json, \.yaml"),
    ]:
        with pytest.raises(ValueError, match=message):
            Plan.load(tmp_path / name)
    (tmp_path / "bad.yaml").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"bad\.yaml: is not UTF-8"):
        Plan.load(tmp_path / "bad.yaml")


# Errors


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "an empty plan"),
        ("hybird:tensor=2", "unknown layout 'hybird'; did you mean 'hybrid'; known are single"),
        ("data:tensor=2", "data has no option 'tensor'; it has states, recompute"),
        ("zero1:states=gradients", "zero1 has no option 'states'; it has recompute"),
        ("zero4", "unknown layout 'zero4'; did you mean 'zero"),
        ("hybrid", "hybrid needs a degree: hybrid:tensor=2"),
        ("hybrid:tensor=0", "hybrid: tensor=0: should be a whole number from 1 to 1000000"),
        ("hybrid:tensor=2,tensor=4", "write each option once"),
        ("sharded-data:states=none", "states=none is none of optimizer, gradients, parameters"),
        ("data:recompute=maybe", "recompute=maybe is neither yes nor no"),
        ("data; head", "'head' should read PATTERN=LAYOUT or @SETTING=VALUE"),
        ("data; head=single", "single is a layout of the whole plan"),
        ("data; head=auto", "auto is a layout of the whole plan"),
        ("data; @row=1,2", "unknown setting '@row'; did you mean 'rows'"),
        ("data; @rows=1,2; @rows=1,2", "the setting @rows stands there twice"),
        ("data; @rows=0,0", "shares from 0 to 1000000, not all zero"),
        ("data; @rows=1,-2", "rows=1,-2: should be shares like 3,3,2"),
        ("data; @ranks=1,1", "ranks=1,1: each rank once"),
        ("data; @ranks=3-1", "3-1 runs backwards"),
        ("data; a.3-1.b=tensor", r"pattern 'a.3-1.b': 3-1 runs backwards; .* \[3\]-1"),
        ("data; @micro_batches=0", "micro_batches=0 should be at least 1"),
        ("data; @global_batch=many", "global_batch=many: should be a whole number"),
        ("data; @pieces=0", "pieces=0 should be at least 1 and at most 2147483648"),
        ("data; @pieces=2147483649", "pieces=2147483649 should be at least 1 and at most"),
        ("data; @pieces=-4", "pieces=-4: should be a whole number"),
        ("data; @pieces=2.5", "pieces=2.5: should be a whole number"),
        ("data; @pieces=", "'@pieces=' should read PATTERN=LAYOUT or @SETTING=VALUE"),
        ("data; @pieces=1; @pieces=4", "the setting @pieces stands there twice"),
        ("data; @piece=4", "unknown setting '@piece'; did you mean 'pieces'"),
        ("data; @schedule=1fb1", "unknown schedule '1fb1'; did you mean '1f1b'"),
        ("data; @synchronisation=never", "is none of every-step, server:S, "),
        ("data; @servers=4", "@synchronisation=every-step has no servers: write one that has"),
        ("data; @synchronisation=local:2; @servers=4", "local:2 has no servers"),
        ("data; @synchronisation=server:2; @servers=4", "name the ranks of 2 servers"),
        ("data; @synchronisation=server:2; @servers=4,4", "name the ranks of 2 servers"),
        (
            "data; @compression=int9",
            "'int9' is no compressor; did you mean 'int8'; known are fp16",
        ),
        ("data; @compression=a:b:int8", "'b' is no compressor"),
        ("data; @compression=topk:0", "'topk:0': topk takes the fraction that is sent, above 0"),
        ("data; @compression=topk:1.5", "topk takes the fraction .* at most 1: topk:0.01"),
        ("data; @compression=topk", "topk takes the fraction"),
        ("data; @compression=powersgd:0", "powersgd takes a rank, a whole number of at least 1"),
        ("data; @compression=a:powersgd:1.5", "powersgd takes a rank"),
        ("data; @compression=onebit:2", "onebit takes no number"),
        ("data; @compression=:int8", "pattern '': should be printable"),
        ("data; @stages=0:a; @ranks=0", "stages with their own ranks exclude @ranks"),
        ("data; @stages=0-2:a/2-3:b", "stages 0-2:a and 2,3:b overlap in part"),
        ("data; @stages=0,1:a/1,0:b", "overlap in part"),
        ("data; @stages=0,0:a/1:b", "each rank stands once in a stage"),
        ("data; @stages=0:a/0:b", "0:a and 0:b follow each other on the same ranks"),
        ("data; @stages=0:/1:b", "needs ranks and its first component"),
        ("pipeline:microbatches=2; @micro_batches=4", "microbatches=2 .* micro_batches=4 differ"),
    ],
)
def test_texts_that_are_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.parse(text)


@pytest.mark.parametrize(
    ("text", "world", "message"),
    [
        ("hybrid:tensor=3", 8, r"data\(2\) x tensor\(3\) != 8 devices: .* 1, 2, 4, 8"),
        ("hybrid:tensor=2,data=2", 8, r"data\(2\) x tensor\(2\) != 8 devices"),
        ("hybrid:tensor=4", 2, r"data\(1\) x tensor\(4\) != 2 devices"),
        ("data; encodr.*=tensor", 2, "'encodr.*' matches no component; did you mean 'encoder"),
        ("data; zzz=tensor", 2, "'zzz' matches no component; there are 'embeddings'"),
        (
            "data; encoder.layer.2-9.mlp=tensor",
            2,
            "'encoder.layer.2-9.mlp' matches no component; there are 'encoder.layer.0.mlp' to "
            "'encoder.layer.1.mlp'",
        ),
        (
            "data; encodr.layer.0-1.mlp=tensor",
            2,
            "matches no component; did you mean 'encoder.layer.[01].mlp'",
        ),
        ("data; zzz=tensor; classifier=hybrid:tensor=3", 2, "zzz.*; hybrid:tensor=3: data"),
        ("data; @rows=1,2,3", 2, r"3 shares \(1,2,3\), but the largest data degree is 2"),
        ("auto", 2, "auto is no layout"),
        ("pipeline:stages=7", 7, "has 6 components: take at most 6 stages, or name modules"),
        ("pipeline:stages=2", 2, "does not say where stages begin"),
        (
            "data; @stages=0:embeddings/1:encodr",
            2,
            "first component 'encodr' is none",
        ),
        (
            "data; @stages=0:encoder/1:classifier",
            2,
            "with the model's first component, 'emb",
        ),
        (
            "data; @stages=0:embeddings/1:classifier/0:encoder",
            2,
            "begins with 'encoder.layer.0.att",
        ),
    ],
)
def test_plans_that_do_not_fit(text: str, world: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.parse(text).layouts(NAMES, world)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "plan: default is missing"),
        ("[]", "plan: should be a mapping, not a list"),
        ('{"default": 3}', "plan: default: should be text, not 3"),
        ('{"default": "dta"}', "plan: default: unknown layout 'dta'; did you mean 'data'"),
        ('{"default": "data", "shards": 1}', "plan: unknown key 'shards'; known are default"),
        ('{"default": "data", "default": "tensor"}', "plan: the key 'default' stands there twice"),
        ('{"default": "data", "rows": [1, NaN]}', "NaN is not a number that this format has"),
        ('{"default": "data", "rows": [1, 2.5]}', r"rows\[1\]: should be a whole number, not 2.5"),
        ('{"default": "data", "rows": [true]}', r"rows\[0\]: should be a whole number, not true"),
        ('{"default": "data", "micro_batches": -1}', "micro_batches: should be from 1 to"),
        ('{"default": "data", "pieces": 0}', "plan: pieces: should be from 1 to 2147483648"),
        ('{"default": "data", "pieces": "4"}', "plan: pieces: should be a whole number"),
        (
            '{"default": "data", "overrides": [{"pattern": "a"}]}',
            r"overrides\[0\]: word is missing",
        ),
        (
            '{"default": "data", "overrides": [{"pattern": "a.9-1", "word": "tensor"}]}',
            r"plan: overrides\[0\]: pattern 'a.9-1': 9-1 runs backwards",
        ),
        (
            '{"default": "data", "overrides": [{"pattern": "a", "word": "tenso"}]}',
            r"overrides\[0\]\.word: unknown layout 'tenso'",
        ),
        ('{"default": "data", "ranks": [0, 0]}', "plan: ranks=0,0: each rank once"),
        ('{"default": "data", "micro_batches": 1' + "0" * 5000 + "}", "plan: "),
        ("[" * 100_000, "nested deeper than 32 levels"),
        ("[" * 50 + "]" * 50, "nested deeper than 32 levels"),
        ('{"default": ', "plan: Expecting value"),
    ],
)
def test_json_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("default: no", "plan: default: should be text, not false"),
        ("default: data\ndefault: tensor", "plan: the key 'default' stands there twice"),
        ("default: data\nrows: [010]", "plan: 010 is not a plain decimal number"),
        ("default: data\nmicro_batches: .nan", "micro_batches: should be a whole number, not nan"),
        ("default: &a data\nschedule: *a", r"plan: aliases \(\*a\) are not read"),
        ("a: &a [x]\nb: &b [*a, *a]\nc: [*b, *b]", "aliases"),
        ("default: !!python/object/apply:os.getcwd []", "plan: not YAML: could not determine"),
        ("1: data", "plan: keys should be text, not 1"),
        ("default: [", "plan: not YAML: "),
        ("[" * 5000, "nested deeper than 32 levels"),
        ("", "plan: should be a mapping, not nothing"),
    ],
)
def test_yaml_that_is_no_plan(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Plan.from_yaml(text)


def test_reserved_characters_in_patterns() -> None:
    for pattern in ("a;b", "a=b", "@a", " a", "", "a\nb", "\x1b[31m"):
        with pytest.raises(ValueError, match="pattern"):
            Override(pattern, LayoutSpec("data"))


@pytest.mark.parametrize(
    ("text", "patterns"),
    [
        ("data; a=hybrid:tensor=2; @rows=1,2; @ranks=1,0", []),
        ("auto", ["planner"]),
        (
            "zero1; @stages=0,1:a/2,3:b; @schedule=zero-bubble; @rows=1,2",
            ["@schedule=zero-bubble .* use 1f1b, or leave", "@rows of several stages"],
        ),
        ("data; @stages=0:a/1:b; @schedule=zero-bubble-2", []),
        ("data; a=sharded-data", []),
        ("tensor:recompute=yes", []),
        ("data; @synchronisation=local:8", []),
        ("zero1; @synchronisation=local:8; @stages=0:a/1:b", ["whole optimizer state"]),
        ("hybrid:tensor=2; @compression=int8", []),
        ("data; @synchronisation=ssp:2,stale=1; @servers=1,2", []),
        ("data; a=tensor; @synchronisation=server:1; @servers=1", ["leave @servers out"]),
        ("data; a=sharded-data; @compression=int8", ["sums that every rank gets whole: leave"]),
        ("data; @synchronisation=local:8; @compression=int8", ["send no gradients that could be"]),
    ],
)
def test_what_is_not_executed_yet(text: str, patterns: list[str]) -> None:
    sentences = unsupported(Plan.parse(text))
    assert len(sentences) == len(patterns)
    for sentence, pattern in zip(sentences, patterns, strict=True):
        assert re.search(pattern, sentence), sentence


def test_another_global_batch_than_is_stated_is_refused() -> None:
    plan = Plan.parse("data; @global_batch=64")
    plan.check_rows(64)
    message = (
        "@global_batch=64, but the global batch has 48 rows: give batches of 64 rows, or leave"
    )
    with pytest.raises(ValueError, match=message):
        plan.check_rows(48)


# Stages


@pytest.mark.parametrize(
    ("text", "firsts", "cut"),
    [
        ("pipeline:stages=2,microbatches=4", "a c", "data; @stages=0,1:a/2,3:c; @micro_batches=4"),
        ("hybrid:stages=2,tensor=2", "a b", "hybrid:tensor=2; @stages=0,1:a/2,3:b"),
        ("pipeline:stages=2; @ranks=3,1", "a b", "data; @stages=3:a/1:b"),
        (
            "pipeline:stages=4; @schedule=interleaved", "a b c d",
            "data; @stages=0,1:a/2,3:b/0,1:c/2,3:d; @schedule=interleaved",
        ),
    ],
)  # fmt: skip
def test_open_cuts_become_stages_on_equal_groups(text: str, firsts: str, cut: str) -> None:
    plan = Plan.parse(text)
    assert plan.open_cuts and str(plan.cut(firsts.split(), 4)) == cut
    assert not plan.cut(firsts.split(), 4).open_cuts


def test_groups_that_do_not_divide_the_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="3 groups of equally many ranks do not divide 4 devices"):
        Plan.parse("pipeline:stages=3").cut("abc", 4)
    with pytest.raises(ValueError, match="their number is even, not 3"):
        Plan.parse("pipeline:stages=3; @schedule=interleaved").cut("abc", 6)


def test_the_global_batch_is_cut_before_its_parts_lie_on_data_ranks() -> None:
    plan = Plan.parse("data; @micro_batches=2")
    assert plan.micro_rows(12) == ((0, 6), (6, 12))
    assert plan.own_rows(12, 3, 1) == ((2, 4), (8, 10))
    assert Plan.parse("data; @micro_batches=4").micro_rows(3) == ((0, 1), (1, 2), (2, 3))


@given(st.integers(0, 40), st.integers(1, 6), st.integers(1, 5))
def test_every_row_lies_on_one_data_rank(rows: int, data: int, micro_batches: int) -> None:
    plan = Plan.parse(f"data; @micro_batches={micro_batches}")
    owned = [r for i in range(data) for a, b in plan.own_rows(rows, data, i) for r in range(a, b)]
    assert sorted(owned) == list(range(rows))


@pytest.mark.parametrize(
    ("word", "steps"),
    [
        ("downpour:2", 1), ("downpour:1,push=2,fetch=3", 3), ("shat:1", 1), ("ssp:1,stale=1", 1),
        ("ssp:2,stale=5", 5),
    ],
)  # fmt: skip
def test_steps_between_fetches(word: str, steps: int) -> None:
    assert Plan.parse(f"data; @synchronisation={word}").sync.between_fetches == steps
