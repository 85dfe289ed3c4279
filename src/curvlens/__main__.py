"""`python -m curvlens` is the command line."""

from curvlens.cli import main

main()
