"""Programs built from the rooms; no room imports this one."""
