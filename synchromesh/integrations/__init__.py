"""Integrations: loops of other libraries around a trainer of ours; each needs its own extra."""
