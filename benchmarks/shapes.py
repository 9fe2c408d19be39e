"""The sizes of the flagship beside its own that the benchmarks go through."""

from __future__ import annotations

from pathlib import Path

import kgen

SPECS = Path(__file__).parent / "specs"
SHAPES = ("64x64", "128x128", "512x512", "batch 1", "batch 8", "64 channels", "5x5")


def shape_name(name: str, shape: str) -> str:
    """Of the spec in `benchmarks/specs` for a size of the spec of that name."""
    return "_".join([name, *shape.split()])


def shaped(spec: kgen.Spec, shape: str) -> kgen.Spec:
    """The spec in another of SHAPES, its knobs chosen anew."""
    return kgen.load_spec(SPECS / f"{shape_name(spec.name, shape)}.yaml")
