"""Rulers: bits, time, the device. Knows torch, and nothing of ops or engines."""
