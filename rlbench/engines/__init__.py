"""Engines: ways to compute an op. One file an engine, named after it; found by file name."""
