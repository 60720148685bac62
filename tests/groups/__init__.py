"""Groups of ranks: agreement whatever the delays, divergences named, the same tokens in every layout."""
