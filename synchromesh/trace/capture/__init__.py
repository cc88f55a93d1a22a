"""Capture: a model, its loss and a batch become one flat graph, cut into components."""
