"""Models of docs/models.md that are drawn and widened."""

import pytest

from benchmarks import drawn, zoo
from benchmarks.architectures import CONFIGURATIONS


def test_a_seed_draws_the_same_models_again() -> None:
    assert drawn.names(1) == drawn.names(1) != drawn.names(2)
    assert len(set(drawn.names(1))) == drawn.COUNT and set(drawn.names(1)) < set(CONFIGURATIONS)


@pytest.mark.parametrize("name", ["opt", "convnext", "efficientnet"])
def test_a_wider_model_has_more_of_everything(name: str) -> None:
    def parameters(times: int) -> int:
        return sum(p.numel() for p in zoo.make(f"{name}*{times}")[0]().parameters())

    assert parameters(4) > 6 * parameters(1)
    build, loss, batch, _ = zoo.make(f"{name}*2")
    loss(build(), batch).backward()


def test_models_are_widened_until_a_step_is_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "seconds", lambda name: 1e-3 * int(name.partition("*")[2]) ** 2)
    found = list(drawn.widened(1))
    assert found == [f"{name}*12" for name in drawn.names(1)], "144 ms, the first above 120"
    monkeypatch.setattr(drawn, "seconds", lambda name: 0.0)
    assert all(name.endswith(f"*{drawn.TIMES[-1]}") for name in drawn.widened(1))
