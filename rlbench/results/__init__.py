"""What was measured, as data. A leaf: knows nothing of ops, engines or scenarios."""
