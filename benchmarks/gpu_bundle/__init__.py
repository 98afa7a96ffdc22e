"""A bundle that proves and measures this package on a GPU host without a network or a compiler: see README.md here."""
