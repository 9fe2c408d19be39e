"""The sizes of a block beside its own that the benchmarks go through."""

from __future__ import annotations

import kgen

# What each changes of a problem.
SHAPES: dict[str, dict[str, object]] = {
    "64x64": {"height": 64, "width": 64},
    "128x128": {"height": 128, "width": 128},
    "512x512": {"height": 512, "width": 512, "batch": 32},
    "batch 1": {"batch": 1},
    "batch 8": {"batch": 8},
    "64 channels": {"out_channels": 64},
    "5x5": {"kernel_size": (5, 5)},
}


def shaped(spec: kgen.Spec, shape: str) -> kgen.Spec:
    """The spec for another of SHAPES, its knobs chosen anew."""
    problem = spec.problem.model_copy(update=SHAPES[shape])
    name = "_".join([spec.name, *shape.split()])
    new = spec.model_copy(update={"name": name, "problem": problem})
    return new.model_copy(update={"schedule": type(spec.schedule)()})
