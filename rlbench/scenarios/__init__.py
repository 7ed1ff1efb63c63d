"""Scenarios: one question about an engine a file. They ask the op and know no engine by name."""
