"""Results: what was measured of runs, as values; the document of a study, and its table."""
