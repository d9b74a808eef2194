"""What a run on fixed image features is made of; every field is public."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from weightclip.errors import WeightclipError
from weightclip.noise import AdamAware, Allocation, Equal, LeastVariance

ALLOCATIONS: dict[str, Allocation] = {
    "equal": Equal(),
    "least-variance": LeastVariance(),
    "adam-aware": AdamAware(),
}


@dataclass(frozen=True)
class HeadSettings:
    """A dense head (linear, or with one hidden layer of ReLU units) and how it is trained.

    Attributes:
        hidden: Units of the hidden layer; 0 for a linear head.
        batch: Expected batch size b.
        steps: Number of steps T.
        learning_rate: Adam's, decaying linearly to zero.
        average: Decay of the exponential parameter average that is evaluated.
        loss_cap: B, bound on each record's gradient at the logits; None leaves the sqrt(2) of cross-entropy.
        temperature: tau; the loss is tau CE(z/tau), whose gradient bound does not depend on tau.
        weight_norm: C of ClipWeights on both layers; None leaves weights alone.
        sphere: Fix-Lip: weights are put *on* the sphere of norm C instead of inside the ball.
        cotangent_radius: R_1 on the hidden layer's cotangent; None takes the bound of the weights.
        layer_radius: X_2 on the output layer's input factor (h, beta); None takes the bound of the weights.
        layer_caps: t_k of separate caps on each layer's per-record gradient.
        joint_cap: t_k of one cap over both layers; equal t_k is flat clipping, that is DP-SGD.
        bias_scale: beta.
        allocation: Name of the allocation of noise over layers (not used by the joint cap).
        gain: Multiplier of the initial hidden weights.
    """

    hidden: int = 128
    batch: int = 4096
    steps: int = 500
    learning_rate: float = 0.02
    average: float = 0.95
    loss_cap: float | None = None
    temperature: float = 1.0
    weight_norm: float | None = None
    sphere: bool = False
    cotangent_radius: float | None = None
    layer_radius: float | None = None
    layer_caps: tuple[float, ...] | None = None
    joint_cap: tuple[float, ...] | None = None
    bias_scale: float = 0.3
    allocation: str = "adam-aware"
    gain: float = 1.0

    def __post_init__(self) -> None:
        if self.allocation not in ALLOCATIONS:
            raise WeightclipError(f"HeadSettings.allocation: one of {', '.join(ALLOCATIONS)}, got {self.allocation!r}")
        for name in ("layer_caps", "joint_cap"):
            caps = getattr(self, name)
            if caps is not None:
                object.__setattr__(self, name, tuple(float(c) for c in caps))
                if len(caps) != self.layers:
                    raise WeightclipError(f"HeadSettings.{name}: {self.layers} layers need as many caps, got {caps}")
        if self.sphere and self.weight_norm is None:
            raise WeightclipError("HeadSettings.sphere needs weight_norm: the radius of the sphere")

    @property
    def layers(self) -> int:
        """Number of dense layers."""
        return 2 if self.hidden else 1

    def to_dict(self) -> dict[str, Any]:
        """As JSON-ready values."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadSettings:
        """From what `to_dict` gave."""
        return cls(**values)
