"""What an import found: blocks with their specs, and convolutions in none, with reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from kgen.spec import GroupNorm, Spec


@dataclass(frozen=True)
class ImportedBlock:
    """One block of a model.

    path: of its convolution in the model. scope: of the module whose forward holds the block.
    norm: path of its GroupNorm, or `group_norm` for the function. spec: the block; blocks of equal
    sizes share one. parameters: state_dict key of the emitted block -> the model's own key.
    """

    path: str
    scope: str
    norm: str
    spec: Spec
    parameters: Mapping[str, str]

    def line(self, spec: str = "") -> str:
        """The block in one line; `spec` is said in the place of the spec's name."""
        problem = self.spec.problem
        x = [problem.batch, problem.in_channels, problem.height, problem.width]
        steps = [one.op for one in self.spec.chain if not isinstance(one, GroupNorm)]
        chain = " -> ".join(["conv2d", *steps, "group_norm"])
        sizes = ", ".join(str(one) for one in x)
        return f"{self.path}: {spec or self.spec.name}, x [{sizes}], {chain}"

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "path": self.path,
            "scope": self.scope,
            "norm": self.norm,
            "name": self.spec.name,
            "spec_hash": self.spec.hash(),
            "spec": self.spec.canonical(),
            "parameters": dict(self.parameters),
        }


@dataclass(frozen=True)
class Unmatched:
    """A convolution that is in no block, and the rule that keeps it out, in one line."""

    path: str
    reason: str

    def line(self) -> str:
        """The convolution and the reason in one line."""
        return f"{self.path}: not matched: {self.reason}"


@dataclass(frozen=True)
class ImportReport:
    """What was found in a model, in the order in which the model computes it."""

    model: str
    blocks: tuple[ImportedBlock, ...]
    unmatched: tuple[Unmatched, ...] = field(default=())

    @property
    def specs(self) -> tuple[Spec, ...]:
        """The blocks' specs, each once."""
        return tuple(dict.fromkeys(one.spec for one in self.blocks))

    def lines(self) -> list[str]:
        """A line for each block and for each unmatched convolution."""
        found = [one.line() for one in self.blocks] + [one.line() for one in self.unmatched]
        return found or [f"{self.model}: holds no convolution"]

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "model": self.model,
            "blocks": [one.to_json() for one in self.blocks],
            "unmatched": [{"path": one.path, "reason": one.reason} for one in self.unmatched],
        }
