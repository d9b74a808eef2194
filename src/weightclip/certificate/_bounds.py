"""What is public and enforced: the bounds a run is trained under."""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import Tensor, nn

from weightclip.bounds import Rescale, Strategy
from weightclip.errors import WeightclipError
from weightclip.factors import CapNorm, Product

_PER_LAYER = ("weight_norm", "input_radius", "layer_radius", "cotangent_radius", "bias_scale", "layer_cap", "joint_cap")
_CHOICES = ("weight_norm", "input_radius", "layer_radius", "cotangent_radius", "layer_cap", "joint_cap", "limit")

PerLayer = float | Mapping[str, float] | None


@dataclass(frozen=True)
class Certified:
    """Limit every record to its layer's certified bound: weights, radii and the loss say how large a gradient can be.

    Where the certificate is true no gradient is ever scaled (no clipping bias, the idea of the paper); the price is
    noise for the largest gradient that any record could have.
    """


@dataclass(frozen=True)
class Adaptive:
    """Let the enforced limits follow a quantile of the records' norms; the values in Bounds are where they start.

    Attributes:
        quantile: Share of the records that should lie within each limit.
        rate: Step of the geometric update, eta in limit * exp(-eta (share - quantile)).
        noise: sigma_b, standard deviation of the noise on each sum of centred indicators; None: expected batch / 20.
    """

    quantile: float = 0.5
    rate: float = 0.2
    noise: float | None = None

    def __post_init__(self) -> None:
        if not 0 < self.quantile < 1:
            raise WeightclipError(f"Adaptive.quantile must lie in (0, 1), got {self.quantile!r}.")
        if not self.rate > 0 or math.isinf(self.rate):
            raise WeightclipError(f"Adaptive.rate must be a positive number, got {self.rate!r}.")
        if self.noise is not None and not (self.noise > 0 and math.isfinite(self.noise)):
            raise WeightclipError(f"Adaptive.noise must be a positive number or None, got {self.noise!r}.")


class MovingLimits(Protocol):
    """Limits that follow private quantiles, as a plan sees them."""

    def limit(self, field: str, path: str) -> float | Tensor | None:
        """The limit ``field`` of a layer as it stands; None where it does not move."""
        ...


_DEFAULT_CAP = 1.0


@dataclass(frozen=True)
class Bounds:
    """Public bounds, each a number for every layer, a mapping {module name: number}, or None.

    ``Bounds()`` is a joint cap: each record's gradient over all layers is scaled to norm 1 at most (``max_grad_norm``),
    for any model. ``weight_norm`` or ``input_radius`` alone, or ``limit=Certified()``, is weights-only: gradients are
    limited to what the model's certificate allows, and nothing is clipped. Either way every record's gradient is
    limited where it is formed, to what the noise is scaled for.

    Attributes:
        weight_norm: C. None leaves weights alone (cotangent bounds come from certified norms); otherwise ClipWeights at
            ``make_private`` and after every step.
        input_radius: Radius on which each record's model input is projected in the forward. A mapping projects the
            input of the named modules ("" is the model itself).
        layer_radius: X_k, enforced on (x, beta) inside the weight-gradient product only; the forward is unchanged.
        cotangent_radius: R_k, enforced on each record's output gradient inside that product only.
        bias_scale: beta. The bias gradient is multiplied by beta before the noise and divided by it after.
        layer_cap: Cap on the norm of each record's gradient of the layer (exact for dense layers).
        joint_cap: t_k of the joint cap over all layers: one scale per record for the whole gradient.
        max_grad_norm: The joint cap under the name it has elsewhere; give one of the two.
        limit: ``Certified()``: layers without a cap are limited to their certified bounds, which is also what happens
            when ``weight_norm``, ``input_radius``, radii or caps by name are given.
        adaptive: Let layer_radius, cotangent_radius and layer_cap follow private quantiles from where they start.
        p: Exponent of the backward chain: 1, 2 or inf.
        clip: How weights are brought to norm C.
        refresh: Recompute certified norms, and clip weights, every that many steps; in between a bound of how far
            weights have moved is added to the norms, and the noise grows with it.
        spectral: Use the DFT bound of convolutions too (tighter, slower) where it applies.
        caps: How capped convolutions measure a record's gradient; by default the cheapest exact way. A mapping {module
            name: way} chooses for each layer cap; convolutions it does not name take the free bound.
        product: Type and chunking of weight-gradient products (SOUNDNESS section 6).

    Formal guarantees:
        Every number here is a public constant: it must not be computed from the private records.
    """

    weight_norm: PerLayer = None
    input_radius: PerLayer = None
    layer_radius: PerLayer = None
    cotangent_radius: PerLayer = None
    bias_scale: float | Mapping[str, float] = 1.0
    layer_cap: PerLayer = None
    joint_cap: PerLayer = None
    max_grad_norm: float | None = None
    limit: Certified | None = None
    adaptive: Adaptive | None = None
    p: float = 2
    clip: Strategy = field(default_factory=Rescale)
    refresh: int = 1
    spectral: bool = True
    caps: CapNorm | Mapping[str, CapNorm] = CapNorm.CHEAPEST
    product: Product = field(default_factory=Product)

    def __post_init__(self) -> None:
        for name in (*_PER_LAYER, "max_grad_norm"):
            value = getattr(self, name)
            if isinstance(value, Mapping):  # a copy: bounds that change during training would not be those enforced
                object.__setattr__(self, name, dict(value))
            for item in value.values() if isinstance(value, Mapping) else [value]:
                if item is None:
                    continue
                if isinstance(item, bool) or not isinstance(item, numbers.Real) or not 1e-12 <= float(item) <= 1e12:
                    raise WeightclipError(f"Bounds.{name} must be a number between 1e-12 and 1e12, got {item!r}.")
        if isinstance(self.max_grad_norm, Mapping):
            raise WeightclipError("Bounds.max_grad_norm is one number for the whole model: use joint_cap by name.")
        if self.limit is not None and not isinstance(self.limit, Certified):
            raise WeightclipError(f"Bounds.limit must be wc.Certified() or None, got {self.limit!r}.")
        if self.max_grad_norm is not None:
            if self.joint_cap is not None:
                raise WeightclipError("Bounds.max_grad_norm and joint_cap are one thing: give one of them.")
            object.__setattr__(self, "joint_cap", self.max_grad_norm)
            object.__setattr__(self, "max_grad_norm", None)  # one thing, kept once: copies of these bounds stay valid
        if self.limit is not None and self._on_all("joint_cap"):
            raise WeightclipError("Bounds.limit=Certified() and a cap on all layers exclude each other: give one.")
        if self.p not in (1, 2, math.inf):
            raise WeightclipError(f"Bounds.p must be 1, 2 or inf, got {self.p!r}.")
        if self._on_all("joint_cap") and self.layer_cap is not None:
            raise WeightclipError("Bounds.joint_cap already caps every layer: leave layer_cap out.")
        if isinstance(self.caps, Mapping):
            object.__setattr__(self, "caps", {path: CapNorm(kind) for path, kind in self.caps.items()})
            if self.joint_cap is not None:
                raise WeightclipError("Bounds.caps by layer goes with layer_cap: give one way for the joint cap.")
        if not isinstance(self.refresh, int) or self.refresh < 1:
            raise WeightclipError(f"Bounds.refresh must be a whole number of steps >= 1, got {self.refresh!r}.")

    def chosen(self) -> Bounds:
        """These bounds, or the default cap where nothing says how records are limited."""
        if any(getattr(self, name) is not None for name in _CHOICES) or self.p != 2:
            return self
        return replace(self, joint_cap=_DEFAULT_CAP)

    def _on_all(self, name: str) -> bool:
        """Whether this field is set for every layer alike."""
        return getattr(self, name) is not None and not isinstance(getattr(self, name), Mapping)

    def limits_all(self) -> bool:
        """Whether every layer has a limit that asks nothing of the loss: a cap, or radii on both factors."""
        radii = self._on_all("layer_radius") and self._on_all("cotangent_radius")
        return self._on_all("joint_cap") or self._on_all("layer_cap") or radii

    def is_open(self) -> bool:
        """Whether no limit asks for a certificate, so that any model of known layers can be trained untraced."""
        if self.p != 2 or not self.limits_all():
            return False
        # elsewhere these may certify less than the limit, and the noise is scaled for the smaller of the two
        certifying = (self.weight_norm, self.input_radius, self.limit)
        return self._on_all("joint_cap") or all(value is None for value in certifying)

    def of(self, name: str, path: str) -> float | None:
        """The value of field ``name`` for the layer called ``path``."""
        value = getattr(self, name)
        if isinstance(value, Mapping):
            return value.get(path, 1.0 if name == "bias_scale" else None)
        return value

    def caps_of(self, path: str) -> CapNorm:
        """How the layer called ``path`` measures its gradients under a cap."""
        return self.caps.get(path, CapNorm.FREE) if isinstance(self.caps, Mapping) else self.caps

    def check_names(self, model: nn.Module) -> None:
        """Refuse names that no module of the model has, and names of modules where the bound would mean nothing."""
        known = dict(model.named_modules())
        for name in (*_PER_LAYER, "caps"):
            value = getattr(self, name)
            for path in value if isinstance(value, Mapping) else ():
                if path not in known:
                    raise WeightclipError(f"Bounds.{name} names '{path}', which is no module of the model.")
                if name != "input_radius" and next(known[path].parameters(recurse=False), None) is None:
                    raise WeightclipError(f"Bounds.{name} names '{path}', which has no parameters of its own.")

    def projections(self) -> dict[str, float]:
        """Module path -> radius of the projections in the forward."""
        if self.input_radius is None:
            return {}
        return dict(self.input_radius) if isinstance(self.input_radius, Mapping) else {"": float(self.input_radius)}
