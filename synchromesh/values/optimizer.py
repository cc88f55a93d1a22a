"""Optimizers whose update of one entry depends on other entries of the parameter."""

# what an update of one entry depends on besides, by class name in lower case, of any package
COUPLED = {
    "adafactor": "row and column means of the gradient, and the norm of the whole update",
    "muon": "an orthogonalisation of the whole matrix",
    "lamb": "the norm of the whole parameter",
    "lars": "the norm of the whole parameter",
    "novograd": "the norm of the whole gradient",
    "shampoo": "factors of the whole gradient",
    "distributedshampoo": "factors of the whole gradient",
    "soap": "factors of the whole gradient",
    "came": "row and column means of the gradient",
    "prodigy": "sums over all parameters",
    "dadaptadam": "sums over all parameters",
    "dadaptsgd": "sums over all parameters",
    "adam8bit": "blocks of neighbouring entries",
    "adamw8bit": "blocks of neighbouring entries",
}


def coupled(optimizer: object) -> str:
    """Why no parameter of this optimizer may lie in pieces; nothing where they may."""
    kind = type(optimizer)
    for name in (k.__name__.lower() for k in kind.__mro__):
        if name in COUPLED:
            return (
                f"the optimizer {kind.__name__} cannot update pieces of a parameter: its update "
                f"needs {COUPLED[name]}"
            )
    return ""
