"""Settings of one private run of a dense network, all of them public constants."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from weightclip.errors import WeightclipError
from weightclip.noise import Allocation, Equal
from weightclip.tabular import Budget as Budget


@dataclass(frozen=True)
class Adam:
    """Adam, as in torch."""

    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8


@dataclass(frozen=True)
class Sgd:
    """Gradient descent with momentum, as in torch (no dampening)."""

    momentum: float = 0.0


PerLayer = float | tuple[float, ...] | None


@dataclass(frozen=True)
class Settings:
    """One way to train: architecture, optimiser and bounds.

    The bounds mean what they mean in :class:`weightclip.Bounds`. With ``joint_cap`` one scale per record bounds the
    whole gradient, and with the same cap for every layer that *is* flat-clipped DP-SGD (SOUNDNESS section 4);
    otherwise every layer is bounded on its own, from its factors or from the weights.

    Attributes:
        hidden: Widths of the hidden layers; () is a linear model.
        batch: Expected batch size b; the sampling rate is q = b/n, n the (public) number of records.
        epochs: Passes over the data: T = epochs·round(1/q) steps.
        lr: Learning rate at the first step.
        final_lr: Learning rate at the end as a part of `lr`; it falls along a straight line.
        optimizer: `Adam` or `Sgd`.
        averaging: Decay of the exponential average of the weights, 0 for the last iterate.
        init_scale: Factor on the usual initial weights.
        input_radius: Each record is projected on this ball in the forward pass.
        bias_scale: β.
        cap: B, bound of each record's gradient at the raw outputs (Huber's δ for regression).
        temperature: τ of the loss τ·l(z/τ).
        weight_norm: C, one number or one per layer, or None: ClipWeights after every step.
        fix_lip: Rescale weights *to* norm C instead of below it (Fix-Lip).
        layer_radius: X_k, one number or one per layer.
        cotangent_radius: R_k, one number or one per layer.
        joint_cap: t_k, one number or one per layer: DP-SGD.
        allocation: How the noise is spread over the layers; not used with `joint_cap`.
    """

    hidden: tuple[int, ...] = (16,)
    batch: int = 256
    epochs: float = 20
    lr: float = 0.03
    final_lr: float = 1.0
    optimizer: Adam | Sgd = field(default_factory=Adam)
    averaging: float = 0.0
    init_scale: float = 1.0
    input_radius: float | None = 1.0
    bias_scale: float = 1.0
    cap: float | None = None
    temperature: float = 1.0
    weight_norm: PerLayer = None
    fix_lip: bool = False
    layer_radius: PerLayer = None
    cotangent_radius: PerLayer = None
    joint_cap: PerLayer = None
    allocation: Allocation = field(default_factory=Equal)

    def __post_init__(self) -> None:
        object.__setattr__(self, "hidden", tuple(int(h) for h in self.hidden))
        if any(h < 1 for h in self.hidden):
            raise WeightclipError(f"Settings.hidden must hold positive widths, got {self.hidden}.")
        for name in ("batch", "epochs", "lr", "bias_scale", "temperature", "init_scale"):
            _positive(name, getattr(self, name))
        for name in ("input_radius", "cap"):
            if getattr(self, name) is not None:
                _positive(name, getattr(self, name))
        for name in ("weight_norm", "layer_radius", "cotangent_radius", "joint_cap"):
            value = getattr(self, name)
            for item in value if isinstance(value, tuple) else () if value is None else (value,):
                _positive(name, item)
        if not 0 <= self.averaging < 1:
            raise WeightclipError(f"Settings.averaging must lie in [0, 1), got {self.averaging!r}.")
        if not 0 <= self.final_lr <= 1:
            raise WeightclipError(f"Settings.final_lr must lie in [0, 1], got {self.final_lr!r}.")
        if self.fix_lip and self.weight_norm is None:
            raise WeightclipError("Settings.fix_lip needs weight_norm.")

    @property
    def method(self) -> str:
        """ "dp-sgd", "fix-lip" or "lip-dp-sgd", whichever the bounds amount to."""
        return "dp-sgd" if self.joint_cap is not None else "fix-lip" if self.fix_lip else "lip-dp-sgd"

    def sample_rate(self, n: int) -> float:
        """q."""
        return min(1.0, self.batch / n)

    def steps(self, n: int) -> int:
        """T."""
        return max(1, round(self.epochs * max(1, round(1 / self.sample_rate(n)))))

    def per_layer(self, name: str, default: float = math.inf) -> tuple[float, ...]:
        """The value of a bound for every layer, `default` where there is none."""
        value, count = getattr(self, name), len(self.hidden) + 1
        if isinstance(value, tuple):
            if len(value) != count:
                raise WeightclipError(f"Settings.{name} has {len(value)} values for {count} layers.")
            return value
        return (default if value is None else float(value),) * count


def noise_multiplier(noise: float | Budget | Sequence[float], index: int, q: float, steps: int) -> float:
    """The multiplier of one setting: a number for all, one number each, or what a budget leaves."""
    if isinstance(noise, Budget):
        return noise.sigma(q, steps)
    value = float(noise[index]) if isinstance(noise, Sequence) else float(noise)
    if not (math.isfinite(value) and value >= 0):
        raise WeightclipError(f"train_many: the noise multiplier must be finite and at least 0, got {value}.")
    return value


def _positive(name: str, value: float) -> None:
    if not (isinstance(value, (int, float)) and 0 < value < math.inf):
        raise WeightclipError(f"Settings.{name} must be a positive number, got {value!r}.")
