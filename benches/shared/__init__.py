"""`make bench-shared`: measures two real engines that share tiers."""
