"""A climber that seeks a record beyond its certificate.

Per-record gradients are taken as the engine forms them: layers made private by the engine's own calls, inputs projected
by its own hooks, the certified loss's gradient at the logits, the bias gradient times beta.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from tests._networks import Case
from torch import Tensor, nn

from weightclip.bounds import Numerics
from weightclip.certificate import build_plan
from weightclip.engine._entrance import InputProjection
from weightclip.factors import Collector, Entry, make_layer_private
from weightclip.losses import BCEWithLogits, Cosine, CrossEntropy, MultiMargin


def private_copy(case: Case, names: Sequence[str], uses: Mapping[str, int] | None = None) -> nn.Module:
    """The model as ``PrivacyEngine._install`` leaves it, but for the gates of the engine itself.

    A cap stands for all uses of a layer together: where nobody adds them up, each of ``uses`` gets its share.
    """
    model, bounds = copy.deepcopy(case.model), case.bounds
    for path in names:
        cap = bounds.of("layer_cap", path)
        make_layer_private(
            model.get_submodule(path), radius=bounds.of("layer_radius", path),
            cotangent=bounds.of("cotangent_radius", path), cap=cap and cap / (uses or {}).get(path, 1),
            beta=bounds.of("bias_scale", path) or 1.0, product=bounds.product, caps=bounds.caps,
        )  # fmt: skip
    for path, radius in {"": math.inf, **bounds.projections()}.items():
        hook = InputProjection(radius, bounds.p != 2)
        model.get_submodule(path).register_forward_pre_hook(hook, with_kwargs=True)
    return model


def labels(case: Case) -> list[Tensor]:
    """Labels worth trying for one record."""
    n = case.classes
    if isinstance(case.loss, (CrossEntropy, MultiMargin)):
        return [torch.tensor([c]) for c in range(n)]
    if isinstance(case.loss, Cosine):
        return [*[torch.tensor([c]) for c in range(n)], torch.ones(1, n), -torch.ones(1, n)]
    if isinstance(case.loss, BCEWithLogits):
        return [torch.zeros(1, n), torch.ones(1, n), (torch.arange(n) % 2).float().unsqueeze(0)]
    signs, pairs = ((1.0 - 2 * (torch.arange(n) // k % 2)).unsqueeze(0) for k in (1, 2))
    return [1e3 * torch.ones(1, n), -1e3 * torch.ones(1, n), 1e3 * signs, *([1e3 * pairs] if n > 2 else [])]


@dataclass
class Climber:
    """Looks for the record whose gradient comes nearest to (or beyond) its certificate."""

    case: Case
    sensitivities: dict[str, float]
    generator: torch.Generator

    def __post_init__(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gain 1/sqrt")
            plan = build_plan(self.case.model, self.case.loss, self.case.bounds, self.case.example())
        uses = {path: len(found) for path, found in plan.layers.items()}
        self.model = private_copy(self.case, list(self.sensitivities), uses)
        self.parameters: list[nn.Parameter] = []
        self.place: list[tuple[int, float]] = []
        for k, path in enumerate(self.sensitivities):
            for name, q in self.model.get_submodule(path).named_parameters(recurse=False):
                if q.requires_grad:
                    self.parameters.append(q)
                    self.place.append((k, (self.case.bounds.of("bias_scale", path) or 1.0) if name == "bias" else 1.0))

    def ratios(self, x: Tensor, y: Tensor, graph: bool = False) -> Tensor:
        """||g_k|| / Delta_k of one record, for every layer."""
        z = self.model(x)
        cotangent = self.case.loss.gradient(z, y)
        gradients = torch.autograd.grad(z, self.parameters, cotangent, create_graph=graph, allow_unused=True)
        squares = [torch.zeros(()) for _ in self.sensitivities]
        for g, (k, beta) in zip(gradients, self.place, strict=True):
            if g is not None:
                squares[k] = squares[k] + (beta * g).double().square().sum()
        norms = torch.stack([(s + 1e-300).sqrt() for s in squares])
        return norms / torch.tensor(list(self.sensitivities.values()), dtype=torch.float64)

    def start(self, trials: int) -> tuple[Tensor, Tensor, int, float]:
        """The best of random records of many sizes, with every label."""
        best: tuple[Tensor, Tensor, int, float] | None = None
        for trial in range(trials):
            x = self.fresh(trial)
            for y in labels(self.case):
                found = self.ratios(x, y).detach()
                top = int(found.argmax())
                if best is None or float(found[top]) > best[3]:
                    best = x, y, top, float(found[top])
        assert best is not None
        return best

    def fresh(self, trial: int) -> Tensor:
        """A random record; every third one smooth, every fourth one a spike."""
        shape = (1, *self.case.shape)
        if trial < len(self.case.starts):
            return self.case.starts[trial].clone().view(shape)
        if self.case.tokens:
            if trial % 2:
                return torch.full(shape, trial % 4)
            return torch.randint(0, 4, shape, generator=self.generator)
        size = (1.0, 10.0, 0.1, 1e3)[trial % 4]
        if trial % 3 == 1:
            return torch.randn(1, generator=self.generator).sign() * size * torch.ones(shape)
        x = torch.randn(shape, generator=self.generator) * size
        if trial % 4 == 3:
            keep = torch.zeros(x.numel())
            keep[x.abs().argmax()] = 1.0
            x = x * keep.view(shape)
        return x

    def climb(self, trials: int = 6, steps: int = 10) -> float:
        """The largest ratio found."""
        x, y, k, best = self.start(trials)
        self.record = x, y
        if self.case.tokens:
            return best
        rate = 0.3
        for _ in range(steps):
            x = x.detach().requires_grad_()
            found = self.ratios(x, y, graph=True)
            best = max(best, float(found.detach().max()))
            if not found.requires_grad:
                break
            (slope,) = torch.autograd.grad(found[k].log(), x, allow_unused=True)
            if slope is None or not bool(torch.isfinite(slope).all()) or float(slope.norm()) == 0:
                break
            size = max(float(x.detach().norm()), 1e-3)
            x = x.detach() + rate * size * slope / slope.norm()
            rate *= 0.85
        self.record = x.detach(), y
        return max(best, float(self.ratios(x.detach(), y).detach().max()))

    def scaled(self) -> float:
        """How much the limits that the engine enforces change the gradients of the last record: relative, per layer."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*gain 1/sqrt")
            plan = build_plan(copy.deepcopy(self.case.model), self.case.loss, self.case.bounds, self.case.example())
            evaluations = plan.evaluate(Numerics())
        x, y = self.record
        torch.manual_seed(0)  # masks of dropout
        z = self.model(x)
        cotangent = self.case.loss.gradient(z.detach(), y)
        wanted = torch.autograd.grad(z, self.parameters, cotangent, allow_unused=True)
        found: dict[int, Tensor] = {}
        collector = Collector(lambda place, g: found.__setitem__(place, found.get(place, 0) + g))
        enforced = private_copy(self.case, list(self.sensitivities))
        place = 0
        for path, uses in plan.layers.items():
            layer = enforced.get_submodule(path)
            trained = {name: q for name, q in layer.named_parameters(recurse=False) if q.requires_grad}
            places = [place + list(trained).index(n) if n in trained else None for n in ("weight", "bias")]
            place += len(trained)
            if self.case.bounds.of("layer_cap", path) is None:
                limit = float(evaluations[path].sensitivity) * plan.room(path)
                of = self.case.bounds.of
                make_layer_private(
                    layer, radius=of("layer_radius", path), cotangent=of("cotangent_radius", path), cap=limit,
                    bound=True, beta=of("bias_scale", path) or 1.0, product=self.case.bounds.product,
                )  # fmt: skip
                collector.enter(Entry(layer, *places, len(uses), None, plan.measure(path, None)))
            else:
                collector.enter(Entry(layer, *places, len(uses)))
        with collector.collection(1):
            torch.manual_seed(0)
            output = enforced(x)
            assert not collector.backward([output], [cotangent], [])
        worst = 0.0
        for i, g in enumerate(wanted):
            path = list(plan.layers)[self.place[i][0]]
            shared = len(plan.layers[path]) > 1 and self.case.bounds.of("layer_cap", path) is not None
            if g is not None and not shared:  # a cap stands for all uses together, here for each of them
                f, size = found[i].float(), g.norm().clamp(min=1e-12)
                if self.case.bounds.of("layer_cap", path) is not None and abs(float(f.norm() / size) - 1) < 1e-4:
                    f = f * (size / f.norm())  # the cap cuts in both, by norms that one of them takes more exactly
                worst = max(worst, float((f - g).norm() / size))
        return worst


def largest_ratio(case: Case, sensitivities: dict[str, float] | None = None, seed: int = 0, trials: int = 6,
                  steps: int = 10) -> float:  # fmt: skip
    """How near to its certificate (or beyond) a record's gradient of some layer comes."""
    return climber(case, sensitivities, seed).climb(trials, steps)


def climber(case: Case, sensitivities: dict[str, float] | None = None, seed: int = 0) -> Climber:
    """A climber on the case's own certificate."""
    if sensitivities is None:
        sensitivities = case.certificate().sensitivities
    torch.manual_seed(seed)
    return Climber(case, sensitivities, torch.Generator().manual_seed(seed))
