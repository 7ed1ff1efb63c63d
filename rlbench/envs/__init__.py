"""Environments for engines: which packages were tested together, building one, listing it."""
