"""Experts of `transformers`, whose products are computed as a setting of their model says."""

import traceback

LOOP = "eager"  # over the experts that have tokens: it cannot be traced
BATCHED = "batched_mm"  # for each token with its expert's weights, in any dtype
REMEDY = (
    f'set experts_implementation="{BATCHED}" in the configuration, as '
    f'model.set_experts_implementation("{BATCHED}") does'
)


def products(error: BaseException | None) -> str:
    """The setting of the experts in which `error` was raised; empty where it was not in any, or
    in some that have no setting."""
    if error is None:
        return ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_globals.get("__name__") == "transformers.integrations.moe":
            config = getattr(frame.f_locals.get("self"), "config", None)
            return str(getattr(config, "_experts_implementation", None) or LOOP)
    return products(error.__cause__ or error.__context__)
