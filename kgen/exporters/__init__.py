"""Blocks in the forms that other projects take: what `kgen export` writes."""
