"""`python -m rlbench`, the same as the `rlbench` command."""

from rlbench.cli import main

if __name__ == "__main__":
    main()
