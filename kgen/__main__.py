"""`python -m kgen` is the command line."""

from kgen.cli import main

main()
