"""Runs the command line from a checkout: `python cli.py emit spec.yaml`."""

from kgen.cli import main

if __name__ == "__main__":
    main()
