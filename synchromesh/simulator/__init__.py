"""What a plan does on a cluster that is not there: shared links, slow devices, failures, money."""
