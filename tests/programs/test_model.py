"""A model's tensors and modules, as they were when it was prepared and as they are now."""

from torch import nn

from synchromesh.programs.model import Model


def test_a_module_that_was_added_is_among_the_modules() -> None:
    inner = nn.Sequential(nn.Linear(2, 2))
    net = nn.Sequential(inner, nn.ReLU())
    model = Model(net)
    assert model.modules == tuple(net.modules())
    inner.append(nn.Dropout())
    net[1].later = nn.Tanh()  # type: ignore[assignment]
    assert model.modules == tuple(net.modules()) and len(model.modules) == 6
