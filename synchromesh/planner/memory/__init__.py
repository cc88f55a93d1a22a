"""Memory: what a plan lacks, what would save it, and the sentence that says so."""
