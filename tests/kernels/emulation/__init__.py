"""The kernels' own sources on the CPU, without a GPU: see builds.py."""
