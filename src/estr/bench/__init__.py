"""Measurements that `estr bench NAME` runs: each module has run(quick) -> a dict with `ratio`, both
sides and the machine."""
