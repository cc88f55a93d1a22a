"""Hugging Face's `Trainer` under a plan: `from synchromesh.integrations.transformers import
Trainer`."""

from synchromesh.values.extras import require

require("transformers")

from synchromesh.integrations.transformers.trainer import (  # noqa: E402
    TransformersTrainer as Trainer,
)

__all__ = ["Trainer"]
