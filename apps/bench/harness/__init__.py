"""What the benches share: arithmetic, anchors, peak memory by role, tables and the JSON line."""
