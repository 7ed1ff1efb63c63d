"""Running jobs in worker processes: the parent never imports torch, a worker nothing but it."""
