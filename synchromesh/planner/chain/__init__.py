"""The search over a chain: equations, bounds, labels, and the plans that it finds."""
