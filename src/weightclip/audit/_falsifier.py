"""Falsifier: searches for the record whose gradient is largest, layer by layer, against the certified bound.

Projected gradient ascent with restarts, all restarts and layers at once. The gradients are those the engine forms:
its own layers (radii, caps), its own loss gradient, at the present weights, but without the limit that enforces a
certified bound: a ratio above 1 says that the certificate is false and records would be scaled. Whatever is found is
evaluated once more by an ordinary backward pass before it is reported.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap

from weightclip.audit._subject import TOLERANCE, AuditRun, Records, Subject, frozen_sgd, norms_of_layers, units_of
from weightclip.certificate import Bounds
from weightclip.engine import PrivacyEngine
from weightclip.errors import WeightclipError
from weightclip.factors import products_as_gradients
from weightclip.losses import BCEWithLogits, CrossEntropy, Loss, MultiMargin

Evaluate = Callable[[Records], tuple[dict[str, float], float]]
"""From one record to the norms of its gradient by layer, and its length over all layers in units of the noise."""


@dataclass(frozen=True)
class LayerFinding:
    """One layer: its bound Delta_k, the largest gradient found, and the median over ordinary records."""

    layer: str
    bound: float
    found: float
    typical: float

    @property
    def ratio(self) -> float:
        """found / bound: above 1 the certificate is false, and the limit at the product would act."""
        return self.found / self.bound if math.isfinite(self.found) else math.inf


@dataclass(frozen=True)
class Falsification:
    """What the search found."""

    subject: str  #: name of what was searched
    layers: tuple[LayerFinding, ...]  #: one finding per layer
    joint: float  #: largest found length of one record's whole gradient in units of the noise: above 1 the step leaks
    loudest: Records  #: the record that attains ``joint``

    @property
    def violation(self) -> bool:
        """Whether any ratio, or the joint length, exceeds 1."""
        worst = max([self.joint, *(f.ratio for f in self.layers)])
        return not worst <= 1 + TOLERANCE


def falsify(
    target: Subject | AuditRun | PrivacyEngine,
    *,
    ordinary: Records | None = None,
    seed: int = 0,
    restarts: int = 24,
    steps: int = 60,
) -> Falsification:
    """Search for a record that breaks the certificate of a trainer, a run or a private model at its present weights.

    Args:
        target: What to search; a subject is started without noise first.
        ordinary: Records for the typical ratio (default: the subject's own, or the engine's data).
        seed: Seed of the restarts.
        restarts: Starting points per layer.
        steps: Ascent steps.
    """
    if isinstance(target, Subject):
        target = target.start(target.ordinary(2, seed), 0.0)
    engine = target.engine if isinstance(target, AuditRun) else target
    if engine.training.release.knorm is not None:
        raise WeightclipError("the falsifier measures l2 norms: audit a K-norm mechanism with pure_law.")
    subject = target.subject if isinstance(target, AuditRun) else Subject.of(engine)
    if ordinary is None:
        ordinary = subject.ordinary(64, seed)
    searched, confirm = engine, None
    if any(t is not None for t in engine.training.release.joint):
        # a joint cap is applied after the backward pass, which cannot be differentiated: search under separate caps
        bounds = _separate(subject.bounds, list(engine.plan.layers))
        searched = replace(subject, bounds=bounds, physical=None).start(ordinary, 0.0, rate=1.0).engine
        confirm = through_engine(subject)
    elif any(e.uses > 1 and not e.certified() for e in engine.training.collector.entries):  # uses share one cap
        confirm = through_engine(subject)
    with torch.random.fork_rng(devices=[]), opened(searched):
        torch.manual_seed(seed)
        best = _Search(searched, ordinary, restarts).run(steps)
    with opened(engine):
        tally = _Tally(confirm or _by_backward(engine))
        for x, y in zip(best[0], best[1], strict=True):
            tally.look((x[None], y[None]))
        return tally.report(engine, subject.name, (ordinary[0][:32], ordinary[1][:32]))


def summed_gradient(engine: PrivacyEngine, x: Tensor, y: Tensor, units: list[float]) -> Tensor:
    """The sum of the records' gradients as the engine forms it, in the given units per layer, by a backward pass.

    The engine must be :func:`opened`. Not for joint caps.
    """
    assert engine.model is not None
    blocks = engine.training.release.blocks
    logits = engine.model(x)
    cotangent = engine.criterion.loss.gradient(logits.detach(), y)
    grads = torch.autograd.grad(logits, [b.parameter for b in blocks], cotangent)
    return torch.cat([g.double().flatten() * (b.beta / units[b.layer]) for g, b in zip(grads, blocks, strict=True)])


@contextlib.contextmanager
def opened(engine: PrivacyEngine) -> Iterator[None]:
    """Inside, gradients may be taken from the model's output directly, past the gate: for audits only.

    Layers return their products as gradients, with radii and caps but without the limit that stands for a certified
    bound: whether that bound is true is what a search wants to know.
    """
    gate, entries = engine.training.gate, engine.training.collector.entries
    layers = [layer for entry in entries for layer in (entry.layer, *entry.tied)]
    before, gate.owner = gate.owner, None
    try:
        with products_as_gradients(layers):
            yield
    finally:
        gate.owner = before


def _separate(bounds: Bounds, layers: list[str]) -> Bounds:
    caps = bounds.joint_cap
    if isinstance(caps, Mapping):
        caps = {p: t for p in layers if (t := bounds.of("joint_cap", p)) is not None}
    return replace(bounds, joint_cap=None, layer_cap=caps)


def through_engine(subject: Subject) -> Evaluate:
    """Evaluate one record by a noiseless step of the real engine."""
    run = replace(subject, physical=None, optimizer=frozen_sgd).start(subject.ordinary(1), 0.0, rate=1.0)

    def evaluate(record: Records) -> tuple[dict[str, float], float]:
        run.replace(record)
        release = run.step()
        return run.layer_norms(release), float(release.norm())

    return evaluate


class _Search:
    """Ascent on log ||g_k|| over many records at once: one group of restarts per layer, one for all layers jointly."""

    def __init__(self, engine: PrivacyEngine, ordinary: Records, restarts: int) -> None:
        assert engine.model is not None
        self.engine, self.model, self.loss = engine, engine.model, engine.criterion.loss
        self.parameters = {k: v.detach() for k, v in self.model.named_parameters()}
        self.names = {id(p): k for k, p in self.model.named_parameters()}
        self.layers = len(engine.plan.layers)
        sensitivities = _sensitivities(engine)
        self.weights = sensitivities.square().reciprocal()
        self.units = torch.tensor(units_of(engine, sensitivities), dtype=torch.float64).square().reciprocal()
        self.radius = engine.bounds.projections().get("", math.inf)
        groups = self.layers + 1
        self.group = torch.arange(groups).repeat_interleave(restarts)
        self.select = torch.nn.functional.one_hot(self.group, groups).double()
        labels = label_candidates(self.loss, engine.output_shape, ordinary[1])
        self.y = labels[torch.arange(len(self.group)) % len(labels)]
        self.x = _starts(ordinary[0], len(self.group), self.radius)
        self.floating = self.x.is_floating_point()
        self.tokens = min((m.num_embeddings for m in self.model.modules() if isinstance(m, nn.Embedding)), default=2)

    def squares(self, x: Tensor, y: Tensor) -> Tensor:
        """(layers,) squared norms of one record's gradient; differentiable in x."""
        run = vjp(lambda p: functional_call(self.model, p, (x[None],)), self.parameters)
        z, pull = run[0], run[1]
        gradients = pull(self.loss.gradient(z, y[None]))[0]
        total = [x.new_zeros((), dtype=torch.float64) for _ in range(self.layers)]
        for block in self.engine.training.release.blocks:
            g = gradients[self.names[id(block.parameter)]]
            total[block.layer] = total[block.layer] + (block.beta * g.double()).square().sum()
        return torch.stack(total)

    def value(self, x: Tensor, y: Tensor, select: Tensor) -> Tensor:
        """log of the squared norm of the group's layer over its bound, or of all layers together in units of noise."""
        squares = self.squares(x, y)
        each = torch.cat([squares * self.weights, (squares * self.units).sum().reshape(1)])
        return ((each * select).sum() + 1e-30).log()

    def run(self, steps: int) -> tuple[Tensor, Tensor, Tensor]:
        """(inputs, labels, group) of the best record of each group, and the next best ones."""
        value = vmap(self.value, randomness="different")
        slope = vmap(grad(self.value), randomness="different")
        best_x, best = self.x.clone(), value(self.x, self.y, self.select)
        for t in range(steps):
            if self.floating:
                x = self._ascend(slope(self.x, self.y, self.select), 0.5 * (0.01 ** (t / max(1, steps - 1))))
            else:
                x = self._mutate(best_x)
            found = value(x, self.y, self.select)
            better = found > best
            shape = (-1,) + (1,) * (x.dim() - 1)
            best_x = torch.where(better.view(shape), x, best_x)
            best = torch.where(better, found, best)
            self.x = x
        chosen = []
        for g in range(self.layers + 1):
            mine = (self.group == g).nonzero().flatten()
            chosen.append(mine[best[mine].topk(min(3, len(mine))).indices])
        index = torch.cat(chosen)
        return best_x[index], self.y[index], self.group[index]

    def _ascend(self, gradient: Tensor, rate: float) -> Tensor:
        flat, x = torch.nan_to_num(gradient).flatten(1), self.x.flatten(1)
        length = x.norm(dim=1, keepdim=True).clamp(min=1e-3)
        moved = x + rate * length * flat / flat.norm(dim=1, keepdim=True).clamp(min=1e-20)
        stuck = flat.norm(dim=1, keepdim=True) < 1e-12  # a dead start: try elsewhere
        moved = torch.where(stuck, torch.randn_like(x) * length / math.sqrt(x.shape[1]), moved)
        if math.isfinite(self.radius):
            moved = moved * (self.radius / moved.norm(dim=1, keepdim=True).clamp(min=self.radius))
        return moved.view_as(self.x)

    def _mutate(self, x: Tensor) -> Tensor:
        fresh = torch.randint(0, self.tokens, x.shape, dtype=x.dtype)
        one = fresh.flatten(1)[:, :1].view((-1,) + (1,) * (x.dim() - 1)).expand_as(x)
        other = torch.where(torch.rand(len(x)).view((-1,) + (1,) * (x.dim() - 1)) < 0.3, one, fresh)
        return torch.where(torch.rand(x.shape) < 0.3, other, x)


def label_candidates(loss: Loss, output: tuple[int, ...], like: Tensor) -> Tensor:
    """Labels to try: every class (or a few hundred), both ends of a probability, far and near regression targets."""
    shape = like.shape[1:]
    if not like.is_floating_point():
        classes = int(output[0]) if isinstance(loss, (CrossEntropy, MultiMargin)) and output else 2
        values = torch.arange(min(classes, 256), dtype=like.dtype)
        return values.view(-1, *(1,) * len(shape)).expand(-1, *shape).contiguous()
    ends = [0.0, 1.0] if isinstance(loss, (BCEWithLogits, CrossEntropy)) else [-1e3, -1.0, 0.0, 1.0, 1e3]
    whole = [torch.full(shape, v, dtype=like.dtype) for v in ends]
    if isinstance(loss, CrossEntropy):
        return torch.eye(output[0], dtype=like.dtype).view(output[0], output[0], *(1,) * (len(shape) - 1)).expand(
            -1, *shape).contiguous()  # fmt: skip
    if math.prod(shape) > 1:
        whole += [ends[0] + (ends[-1] - ends[0]) * torch.randint(0, 2, shape).to(like.dtype) for _ in range(4)]
    return torch.stack(whole)


def _starts(ordinary: Tensor, n: int, radius: float) -> Tensor:
    """Ordinary records, Gaussian directions, single spikes and constants, on the sphere or over many lengths."""
    shape = ordinary.shape[1:]
    if not ordinary.is_floating_point():
        return ordinary[torch.randint(0, len(ordinary), (n,))].clone()
    size = math.prod(shape)
    normal = torch.randn(n, size)
    spikes = torch.eye(size)[torch.randint(0, size, (n,))] * torch.randn(n, 1).sign() + 0.05 * torch.randn(n, size)
    constant = torch.randn(n, 1).sign() + 0.1 * torch.randn(n, size)
    known = ordinary[torch.randint(0, len(ordinary), (n,))].flatten(1).float()
    kind = (torch.arange(n) // 2 % 4)[:, None]
    x = torch.where(kind == 0, normal, torch.where(kind == 1, spikes, torch.where(kind == 2, constant, known)))
    x = x / x.norm(dim=1, keepdim=True).clamp(min=1e-12)
    length = radius * torch.rand(n, 1).sqrt() if math.isfinite(radius) else 10 ** (3 * torch.rand(n, 1) - 1)
    return (x * length).view(n, *shape).to(ordinary.dtype)


class _Tally:
    """What was found so far: the largest gradient of every layer, and the record that is longest over all of them."""

    def __init__(self, evaluate: Evaluate) -> None:
        self.evaluate, self.joint, self.loudest = evaluate, 0.0, None
        self.found: dict[str, float] = {}

    def look(self, record: Records) -> float:
        """Take one record into account; the length of its gradient over all layers."""
        norms, length = self.evaluate(record)
        for path, norm in norms.items():
            self.found[path] = max(self.found.get(path, 0.0), norm) if math.isfinite(norm) else math.inf
        if self.loudest is None or not length <= self.joint:
            self.joint, self.loudest = (length if math.isfinite(length) else math.inf), record
        return length

    def report(self, engine: PrivacyEngine, name: str, ordinary: Records) -> Falsification:
        """All of it, beside the engine's bounds and what ordinary records have."""
        assert self.loudest is not None
        usual = [list(self.evaluate((x[None], y[None]))[0].values()) for x, y in zip(*ordinary, strict=True)]
        typical = torch.tensor(usual).median(0).values.tolist()
        rows = zip(self.found, _sensitivities(engine).tolist(), self.found.values(), typical, strict=True)
        x, y = self.loudest
        layers = tuple(LayerFinding(*row) for row in rows)
        return Falsification(name, layers, self.joint, (x.detach().clone(), y.clone()))


def _sensitivities(engine: PrivacyEngine) -> Tensor:
    return engine.training.release.sensitivities(engine.training.sensitivity.evaluate())


def _by_backward(engine: PrivacyEngine) -> Evaluate:
    """Evaluate one record by a backward pass through an engine that is :func:`opened`."""
    units = units_of(engine, _sensitivities(engine))

    def evaluate(record: Records) -> tuple[dict[str, float], float]:
        g = summed_gradient(engine, *record, units)
        return norms_of_layers(engine, g, units), float(g.norm())

    return evaluate


def climb(subject: Subject, *, seed: int = 0, restarts: int = 4, steps: int = 20) -> Falsification:
    """Search for a record that moves a release by more than its noise allows, by trial alone; labels are ordinary ones.

    For models that torch.func cannot transform. Records are changed at random, and what is louder is kept. Every record
    that is tried runs through the real engine, one noiseless step each, so that any model, loss and kind of record can
    be searched; it needs no derivatives of gradients and finds less than :func:`weightclip.audit.falsify`.

    Args:
        subject: The trainer; it is started without noise.
        seed: Seed of the search.
        restarts: Records to begin with.
        steps: Changes tried on each; every fourth enlarges numbers instead of moving them.
    """
    generator = torch.Generator().manual_seed(seed)
    tally, ordinary = _Tally(through_engine(subject)), subject.ordinary(max(8, restarts), seed)
    engine = subject.start(subject.ordinary(2, seed), 0.0).engine
    tokens = 1 + int(ordinary[0].max())
    for i in range(restarts):
        best = ordinary[0][i : i + 1], ordinary[1][i : i + 1]
        top = tally.look(best)
        for t in range(steps):
            x = _changed(best[0], tokens, generator, larger=t % 4 == 3)
            y = best[1] if t % 2 else ordinary[1][torch.randint(len(ordinary[1]), (1,), generator=generator)]
            length = tally.look((x, y))
            if not length <= top:
                best, top = (x, y), length
    return tally.report(engine, subject.name, ordinary)


def _changed(x: Tensor, tokens: int, generator: torch.Generator, larger: bool) -> Tensor:
    """Some tokens replaced; or numbers moved by about their own size, or made ten times as large."""
    some = torch.rand(x.shape, generator=generator) < 0.3
    if not x.is_floating_point():
        return torch.where(some, torch.randint(0, tokens, x.shape, generator=generator, dtype=x.dtype), x)
    size = x.square().mean().sqrt().clamp(min=1e-3)
    return 10 * x if larger else torch.where(some, x + size * torch.randn(x.shape, generator=generator).to(x), x)
