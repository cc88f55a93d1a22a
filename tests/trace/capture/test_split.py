"""The cut into components: names, edges and structures of known models, as pictures."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from synchromesh.trace import meta
from synchromesh.trace.capture.capture import trace
from synchromesh.trace.capture.components import component_modules
from synchromesh.trace.capture.run import run
from synchromesh.trace.step import Step
from synchromesh.values.component import Chain
from tests.models import FAMILIES, family, traced


def picture(chain: Chain) -> str:
    """One line per component: its name, and the components that read its values."""
    lines = []
    for component in chain.components:
        readers = [t for e in chain.edges if e.source == component.name for t in e.targets]
        ordered = [n for n in chain.names if n in readers]
        lines.append(f"{component.name} -> {', '.join(ordered)}" if ordered else component.name)
    return "\n".join(lines)


def drawn(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


PICTURES = {
    "vit": """
        vit.embeddings -> vit.layers.0.attention
        vit.layers.0.attention -> vit.layers.0.mlp
        vit.layers.0.mlp -> vit.layers.1.attention
        vit.layers.1.attention -> vit.layers.1.mlp
        vit.layers.1.mlp -> classifier
        classifier
    """,
    "bert": """
        bert.embeddings -> bert.encoder.layer.0.attention
        bert.encoder.layer.0.attention -> bert.encoder.layer.0.intermediate, bert.encoder.layer.0.output
        bert.encoder.layer.0.intermediate -> bert.encoder.layer.0.output
        bert.encoder.layer.0.output -> bert.encoder.layer.1.attention
        bert.encoder.layer.1.attention -> bert.encoder.layer.1.intermediate, bert.encoder.layer.1.output
        bert.encoder.layer.1.intermediate -> bert.encoder.layer.1.output
        bert.encoder.layer.1.output -> bert.pooler
        bert.pooler -> classifier
        classifier
    """,  # noqa: E501
    "gpt2": """
        transformer.wte -> transformer.wpe
        transformer.wpe -> transformer.h.0.attn
        transformer.h.0.attn -> transformer.h.0.mlp
        transformer.h.0.mlp -> transformer.h.1.attn
        transformer.h.1.attn -> transformer.h.1.mlp
        transformer.h.1.mlp -> lm_head
        lm_head
    """,
    # block 1 reads the position bias of block 0; the encoder's last norm is where it is read first
    "t5": """
        encoder.embed_tokens -> encoder.block.0.layer.0
        encoder.block.0.layer.0 -> encoder.block.0.layer.1, encoder.block.1.layer.0
        encoder.block.0.layer.1 -> encoder.block.1.layer.0
        encoder.block.1.layer.0 -> encoder.block.1.layer.1
        encoder.block.1.layer.1 -> decoder.block.0.layer.1
        decoder.embed_tokens -> decoder.block.0.layer.0
        decoder.block.0.layer.0 -> decoder.block.0.layer.1, decoder.block.1.layer.0
        decoder.block.0.layer.1 -> decoder.block.0.layer.2, decoder.block.1.layer.1
        decoder.block.0.layer.2 -> decoder.block.1.layer.0
        decoder.block.1.layer.0 -> decoder.block.1.layer.1
        decoder.block.1.layer.1 -> decoder.block.1.layer.2
        decoder.block.1.layer.2 -> lm_head
        lm_head
    """,
    "resnet": """
        resnet.embedder -> resnet.encoder.stages.0.layers.0.layer, resnet.encoder.stages.0.layers.0.shortcut
        resnet.encoder.stages.0.layers.0.layer -> resnet.encoder.stages.0.layers.0.shortcut
        resnet.encoder.stages.0.layers.0.shortcut -> resnet.encoder.stages.0.layers.1
        resnet.encoder.stages.0.layers.1 -> resnet.encoder.stages.1.layers.0.layer, resnet.encoder.stages.1.layers.0.shortcut
        resnet.encoder.stages.1.layers.0.layer -> resnet.encoder.stages.1.layers.0.shortcut
        resnet.encoder.stages.1.layers.0.shortcut -> resnet.encoder.stages.1.layers.1
        resnet.encoder.stages.1.layers.1 -> classifier.1
        classifier.1
    """,  # noqa: E501
    # the skips leave down1 and down2; concatenations happen where what came up from below was made
    "unet": """
        down1 -> down2, rise1
        down2 -> middle, rise2
        middle -> rise2
        rise2 -> up2
        up2 -> rise1
        rise1 -> up1
        up1 -> head
        head
    """,
    "cnn": """
        features.0 -> features.3
        features.3 -> hidden
        hidden -> classifier
        classifier
    """,
}


@pytest.mark.parametrize("name", PICTURES)
def test_components_and_edges(name: str) -> None:
    assert picture(traced(name).chain) == drawn(PICTURES[name])


@pytest.mark.parametrize("name", ["vit", "bert", "gpt2", "t5", "resnet", "unet", "lstm", "padded"])
def test_laws_of_the_graph(name: str) -> None:
    """Grouped by component; what is read is made there, crosses an edge, or is a placeholder."""
    step = traced(name)
    graph, chain = step.graph, step.chain
    assert graph is not None
    calls = [n for n in graph.nodes if n.op == "call_function"]
    order = [meta.component(n) for n in calls]
    assert order == sorted(order) and set(order) == set(range(len(chain.components)))
    crossing = {(e.value.name, t) for e in chain.edges for t in e.targets}
    seen = set()
    for node in calls:
        mine = chain.names[meta.component(node)]
        for source in node.all_input_nodes:
            if source.op == "placeholder":
                assert meta.role(source) in ("rows", "leaf", "parameter", "buffer", "constant")
                if meta.role(source) == "leaf":
                    seen.add((meta.name(source), mine))
            elif meta.component(source) != meta.component(node):
                seen.add((source.name, mine))
    assert seen == crossing
    (output,) = graph.find_nodes(op="output")
    assert all(meta.component(n) == len(chain.components) - 1 for n in output.all_input_nodes)
    model, _, _ = family(name)
    named = dict(model.named_parameters())
    assert {p.name for c in chain.components for p in c.parameters} <= named.keys()
    assert all(p.shape == named[p.name].shape for c in chain.components for p in c.parameters)


def test_equal_blocks_have_equal_structures() -> None:
    def structures(name: str) -> dict[str, str]:
        return {c.name: c.structure for c in traced(name).chain.components}

    vit, bert, gpt2, llama = (structures(n) for n in ("vit", "bert", "gpt2", "llama"))
    for part in ("attention", "mlp"):
        assert vit[f"vit.layers.0.{part}"] == vit[f"vit.layers.1.{part}"]
    for part in ("attention", "intermediate", "output"):
        assert bert[f"bert.encoder.layer.0.{part}"] == bert[f"bert.encoder.layer.1.{part}"]
    for part in ("attn", "mlp"):
        assert gpt2[f"transformer.h.0.{part}"] == gpt2[f"transformer.h.1.{part}"]
    for part in ("self_attn", "mlp"):
        assert llama[f"model.layers.0.{part}"] == llama[f"model.layers.1.{part}"]
    for names in (vit, bert, gpt2, llama):
        assert len(set(names.values())) > len(names) / 2  # and different ones differ


def test_values_that_depend_on_no_parameter_are_computed_where_they_are_read() -> None:
    """Rotary tables and masks are no edges; the mask's leaf goes to every attention."""
    made = [
        e.value.name
        for e in traced("llama").chain.edges
        if e.source and not e.value.differentiable
    ]
    assert made == []
    (mask,) = (e for e in traced("bert").chain.edges if e.value.name == "mask")
    assert mask.source is None
    assert mask.targets == tuple(f"bert.encoder.layer.{i}.attention" for i in (0, 1))


def test_the_position_bias_has_no_rows() -> None:
    (bias,) = (
        e.value
        for e in traced("t5").chain.edges
        if e.source == "encoder.block.0.layer.0" and e.value.rows is None
    )
    assert bias.shape == (1, 4, 8, 8) and bias.differentiable


def test_buffers_and_effects_are_where_the_norm_is() -> None:
    step = traced("resnet")
    assert step.graph is not None
    effects = [n for n in step.graph.nodes if meta.effect(n)]
    for node in effects:
        component = step.chain.components[meta.component(node)]
        assert set(meta.effect(node)) <= {b.name for b in component.buffers}
    model, _, _ = family("resnet")
    assert {b for n in effects for b in meta.effect(n)} == set(dict(model.named_buffers()))
    evaluated = traced("resnet", False).graph
    assert evaluated is not None and not any(meta.effect(n) for n in evaluated.nodes)


def test_shared_parameters_are_in_every_component_that_reads_them() -> None:
    readers = [
        c.name
        for c in traced("t5").chain.components
        if any(p.name == "shared.weight" for p in c.parameters)
    ]
    assert readers == ["encoder.embed_tokens", "decoder.embed_tokens", "lm_head"]


# -- small models, one rule each ---------------------------------------------------------


def square(model: nn.Module, batch: Any) -> Tensor:
    return model(batch).square().mean()  # type: ignore[no-any-return]


def cut(model: nn.Module, batch: Tensor, *cuts: str) -> Step:
    step = trace(model, square, batch, training=True, cuts=cuts)
    assert step.reason == ""
    assert torch.allclose(run(step, model, batch)[0], square(model, batch))
    return step


class Block(nn.Module):
    """A pre-norm block."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.mix = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mix(self.norm1(x))
        return x + self.feed(self.norm2(x))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Embedding, blocks, a last norm, a head; own parameters at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(4))
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def holding(step: Step) -> dict[str, list[str]]:
    return {c.name: [p.name for p in c.parameters] for c in step.chain.components}


def test_norms_join_what_they_feed() -> None:
    found = holding(cut(Stack(), torch.randn(5, 4)))
    assert list(found) == [
        "embed", "blocks.0.mix", "blocks.0.feed", "blocks.1.mix", "blocks.1.feed", "head",
    ]  # fmt: skip
    assert sorted(found["embed"]) == ["embed.bias", "embed.weight", "position"]
    assert sorted(found["head"]) == ["head.bias", "head.weight", "norm.bias", "norm.weight"]
    assert {n.split(".")[2] for n in found["blocks.1.feed"]} == {"norm2", "feed"}


def test_batch_norms_and_last_norms_join_what_is_before() -> None:
    conv = nn.Sequential(
        nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4), nn.LayerNorm(4)
    )
    found = holding(cut(conv, torch.randn(5, 4)))
    assert found == {
        "0": ["0.weight", "0.bias", "1.weight", "1.bias"],
        "3": ["3.weight", "3.bias", "4.weight", "4.bias"],
    }


def test_cuts_that_a_plan_names() -> None:
    model, x = Stack(), torch.randn(5, 4)
    assert cut(model, x, "blocks.0", "head").chain.names == cut(model, x).chain.names
    found = holding(cut(model, x, "blocks.0.feed.2", "norm"))
    assert list(found)[1:4] == ["blocks.0.mix", "blocks.0.feed", "blocks.0.feed.2"]
    assert found["blocks.0.feed.2"] == ["blocks.0.feed.2.weight", "blocks.0.feed.2.bias"]
    assert found["norm"] == ["norm.weight", "norm.bias"]
    with pytest.raises(ValueError, match=r"no module 'blocks.0.fed' \(near: blocks.0.feed"):
        cut(model, x, "blocks.0.fed")


def test_a_module_called_twice_is_two_components_that_share_parameters() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[0](self.blocks[0](x))  # type: ignore[no-any-return]

    found = holding(cut(Twice(), torch.randn(5, 4)))
    assert list(found) == ["blocks.0.mix", "blocks.0.feed", "blocks.0.mix@1", "blocks.0.feed@1"]
    assert found["blocks.0.feed"] == found["blocks.0.feed@1"]


def test_leaf_root_and_root_without_blocks() -> None:
    assert cut(nn.Linear(4, 3), torch.randn(5, 4)).chain.names == ("linear",)
    modules = component_modules(FAMILIES["lstm"]()[0])
    assert [m.path for m in modules] == ["embedding", "rnn", "classifier"]


def test_layers_of_one_part_beside_a_norm_are_components() -> None:
    """As those of Mamba, whose mixer is no attention with a feed-forward network behind it."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.mixer = nn.LayerNorm(4), Block()

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mixer(self.norm(x))  # type: ignore[no-any-return]

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([Layer() for _ in range(3)])
            self.last = nn.LayerNorm(4)

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x)
            return self.last(x)  # type: ignore[no-any-return]

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.head = Body(), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(x))  # type: ignore[no-any-return]

    found = holding(cut(Model(), torch.randn(5, 4)))
    assert list(found) == ["body.layers.0", "body.layers.1", "body.layers.2", "head"]
    assert found["body.layers.1"][0] == "body.layers.1.norm.weight"
    assert found["head"] == ["body.last.weight", "body.last.bias", "head.weight", "head.bias"]


def test_two_towers() -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Linear(4, 4)
            self.right = nn.Linear(4, 4)
            self.join = nn.Bilinear(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.join(F.relu(self.left(x)), F.relu(self.right(x)))  # type: ignore[no-any-return]

    assert picture(cut(Towers(), torch.randn(5, 4)).chain) == drawn("""
        left -> join
        right -> join
        join
    """)


def test_rows_along_two_dimensions_may_not_cross_a_border() -> None:
    class Similar(nn.Module):
        """Every row with every other, as in contrastive losses."""

        def __init__(self, inside: bool) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)
            self.inside = inside

        def forward(self, x: Tensor) -> Tensor:
            h = self.first(x)
            similar = h @ h.t()
            y = similar.softmax(-1) @ h if self.inside else similar[:, :, None].expand(-1, -1, 4)
            return self.second(y)  # type: ignore[no-any-return]

    assert cut(Similar(True), torch.randn(5, 4)).chain.names == ("first", "second")
    step = trace(Similar(False), square, torch.randn(5, 4), training=True)
    assert step.chain.names == ("first",)  # the two are one
    assert (
        "between the components first and second has rows along two dimensions (0 and 1)"
        in step.merged
    )


def test_random_values_are_made_once() -> None:
    class Noisy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            noise = torch.randn_like(x)
            return self.second(self.first(x + noise)) + noise[:, :1]  # type: ignore[no-any-return]

    step = trace(Noisy(), square, torch.randn(5, 4), training=True)
    assert step.graph is not None
    random = [n for n in step.graph.nodes if n.target is torch.ops.aten.randn_like.default]
    assert [meta.component(n) for n in random] == [0]
    assert any(e.value.name == random[0].name for e in step.chain.edges)
