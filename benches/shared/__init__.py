"""`make bench-shared`: two real engines, and the tiers they share."""
