"""The trace: a training step as a graph, cut into components and partitioned over ranks."""
