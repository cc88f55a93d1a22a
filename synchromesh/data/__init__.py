"""Data: each rank's rows of every global batch, and where in the data a run stands."""
