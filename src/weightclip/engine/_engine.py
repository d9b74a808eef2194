"""PrivacyEngine: puts certified bounds, noise and accounting on the user's own model, optimiser, loader and loss."""

from __future__ import annotations

import functools
import math
import os
import secrets
import warnings
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from weightclip._torch import forward_hooks
from weightclip.accounting import Adjacency, Ledger, Mechanism, calibrate_sigma, epsilon
from weightclip.certificate import KNOWN, Bounds, Certificate, OpenPlan, Plan, build_plan, numerics_for
from weightclip.distributed import Shards, SharedLedger, find_ranks, find_shards
from weightclip.engine import _checkpoint, _report
from weightclip.engine._card import model_card
from weightclip.engine._checkpoint_checks import readable
from weightclip.engine._criterion import PrivateCriterion
from weightclip.engine._digest import settings_digest
from weightclip.engine._entrance import InputProjection, buffers_kept
from weightclip.engine._example import call_of
from weightclip.engine._fused_step import FusedStep
from weightclip.engine._gate import OutputGate
from weightclip.engine._install import install, output_shape, refuse_unused, size_up, test_records, uninstall
from weightclip.engine._step import Spending, Training
from weightclip.engine._together import agree_on_run, make_release, refuse_whole_weights, share_weights
from weightclip.engine._validate import (
    check_accounting,
    check_grid,
    check_labels,
    check_layers,
    check_model,
    check_numbers,
    check_optimizer,
    check_scale,
    check_views,
)
from weightclip.errors import ContractError, WeightclipError
from weightclip.factors import tile_group
from weightclip.losses import recognise
from weightclip.noise import Allocation, Entrywise, Equal, GridSums, KNorm, Streams, calibrate_epsilon0
from weightclip.sampling import TAIL, PoissonLoader, Share, model_draws


class PrivacyEngine(Spending):
    """Trains a model with differential privacy, at the speed and memory of ordinary training.

    Args:
        accountant: "pld" (tight, default) or "rdp" (as in the paper).
        ledger: A file in which every release is counted before it happens; made if there is none. An engine on a ledger
            that holds charges goes on from them. One engine at a time may hold it, until :meth:`detach`.
        ledger_block: Releases counted by one durable write; a run that is killed over-counts by at most that many.

    Formal guarantees:
        After T calls of ``optimizer.step()`` that released a gradient, everything released (the weights after every
        step, and ``p.grad`` after each) is (epsilon, delta)-DP with ``get_epsilon(delta)``, for data sets that differ
        by adding or removing one record (or replacing one, if asked). Public: initial weights, shapes, bounds, sampling
        rate q, expected batch size b, number of steps. Not covered: values of the training loss, anything else the
        loop computes from the records. See ``report()["not_covered"]``. With a ledger this holds for everything all
        its runs released, however often they were killed and resumed; without one, for what this engine released.
    """

    def __init__(self, accountant: str = "pld", *, ledger: Any = None, ledger_block: int = 1) -> None:
        if accountant not in ("pld", "rdp"):
            raise WeightclipError(f"accountant must be 'pld' or 'rdp', got {accountant!r}.")
        self.accountant = accountant
        self.model: nn.Module | None = None
        self.ranks = find_ranks()  # the processes that train together
        self._ledger = None if ledger is None else self.ranks.ledger(ledger, ledger_block)
        self.steps = 0 if self._ledger is None else self._ledger.charges  # also those of abandoned or killed runs
        self.budget: int | None = None
        self.views, self.loss_scale, self.b_max = 1, 1.0, 0
        self._sigma = math.nan  # until make_private
        self.resumed = 0  # how often a checkpoint was loaded
        self._process = 0  # that trains
        self.runs: dict[str, int] = {}  # releases of earlier runs, by their random names, as checkpoints tell them
        self.run = ""  # the name of this one
        self.uncounted = False  # whether releases after the checkpoint that was loaded are known to nobody
        self._training: Training | None = None
        self.shards: Shards | None = None  # of a model under fully_shard

    # -- putting the pieces on -------------------------------------------------------------------------------------

    def make_private(
        self,
        *,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        data_loader: DataLoader,
        criterion: Any,
        noise_multiplier: float,
        bounds: Bounds | None = None,
        sample_rate: float | None = None,
        expected_batch_size: float | None = None,
        max_physical_batch_size: int | None = None,
        generator: torch.Generator | None = None,
        allocation: Allocation | None = None,
        adjacency: Adjacency = Adjacency.ADD_OR_REMOVE_ONE,
        augmentation_multiplicity: int = 1,
        release_grid: float | None = None,
        mechanism: KNorm | None = None,
        loss_scale: float = 1.0,
        example: Any = None,
        strict: bool = False,
        exact_sums: bool = False,
    ) -> tuple[nn.Module, torch.optim.Optimizer, PoissonLoader, PrivateCriterion]:
        """Make training private with a given noise multiplier.

        Args:
            module: The model; the same object is returned, its layers changed in class only.
            optimizer: Any torch optimiser but LBFGS, over the model's trainable parameters; hooked, not replaced.
            data_loader: A loader over a map-style data set; its batches become Poisson samples.
            criterion: A torch loss or one of :mod:`weightclip.losses`.
            noise_multiplier: sigma; 0 means no noise and epsilon = inf.
            bounds: How each record is limited; by default its whole gradient is capped at norm 1 (``Bounds()``).
            sample_rate: q; by default batch_size/len(dataset), thereby declared public.
            expected_batch_size: b, the public divisor; by default the loader's batch size, never len(dataset).
            max_physical_batch_size: Draws are split into a public number of pieces of at most this many records, empty
                ones included; only the last piece's ``step()`` releases.
            generator: Root seed for experiments; by default randomness comes from the operating system. Draws, masks
                and noise then follow from (seed, settings, weights, sums); several runs of one seed do not compose.
            allocation: How noise is spread over layers; equal by default.
            adjacency: Which data sets are neighbours.
            augmentation_multiplicity: M views of each record: the model gets rows*M inputs, views of a record adjacent,
                and the record's gradient is their average. Labels may be given per record or per view.
            release_grid: Round released gradients to multiples of this (after the noise, free of charge).
            mechanism: ``KNorm(p)`` for the K-norm mechanism, epsilon0-DP per step with epsilon0 = 1/noise_multiplier;
                by default the Gaussian.
            loss_scale: A constant by which the loop (or a framework) multiplies the loss before ``backward()``; it
                changes nothing that is released, and any other factor raises.
            example: A batch of inputs, where they are not the first element of a batch (of a mapping: all but its
                labels); a tuple or mapping gives several. Only shapes are read.
            strict: Every physical batch has one public shape and records take secret random rows of it, so that
                kernels whose rounding depends on the shape or on a record's place are covered too; padding costs time.
            exact_sums: Sums of physical batches are added as integers on a public grid, in whatever order: with
                max_physical_batch_size and a seed, one and several processes release the same bits.

        Under torch.distributed all processes call this with the same arguments, the plain model and the whole data set;
        batch sizes are those of all processes together. Every process starts from the weights of rank 0.

        Returns:
            (module, optimizer, loader, criterion).

        Formal guarantees:
            Those of the class, with multiplier ``noise_multiplier``.
        """
        if self.model is not None:
            raise ContractError("this engine already trains a model: use a new PrivacyEngine.")
        self.ranks.check()
        self._process, self.run = os.getpid(), self.ranks.tell(functools.partial(secrets.token_hex, 8))
        self.device = check_model(module)
        if engine_of(module) is not None:
            raise ContractError("the model is already private: call detach() on its engine first.")
        check_layers(module)
        self.shards = find_shards(self.ranks, module)
        check_optimizer(module, optimizer)
        share_weights(self.ranks, module, generator is not None)
        self.bounds = (bounds or Bounds()).chosen()
        self.streams = (Streams.secure() if generator is None else Streams.seeded(generator)).shared(self.ranks.tell)
        batch = getattr(data_loader, "batch_size", None) if expected_batch_size is None else expected_batch_size
        self._sigma, self.expected_batch_size = check_numbers(noise_multiplier, 1 if batch is None else batch)
        self.loader = PoissonLoader(
            data_loader, sample_rate=sample_rate, streams=self.streams, steps_left=self.steps_left,
            expected_batch_size=self.expected_batch_size, max_physical_batch_size=max_physical_batch_size,
            strict=strict, number=lambda: self.steps, on_batch=lambda info: self.training.hand_out(info),
            share=Share(self.ranks.rank, self.ranks.count),
        )  # fmt: skip
        self.adjacency = check_accounting(self.accountant, adjacency, self.loader.sample_rate)
        self.views, self.b_max = check_views(augmentation_multiplicity), self.loader.b_max
        self.loss_scale = check_scale(loss_scale)
        if exact_sums and mechanism is not None:
            raise WeightclipError("exact_sums allows for rounding in the l2 norm of Gaussian noise: drop mechanism.")
        if self.bounds.adaptive is not None and (mechanism is not None or self.bounds.joint_cap is not None):
            raise WeightclipError(
                "Bounds.adaptive follows layer radii and caps under Gaussian noise: drop joint_cap and mechanism."
            )
        loss = recognise(criterion, limited=self.bounds.limits_all())
        call = call_of(module, data_loader, example, self.device)
        is_open = self.bounds.is_open() and mechanism is None
        refuse_whole_weights(self.shards, self.bounds, is_open)
        plan = OpenPlan(module, self.bounds) if is_open else build_plan(module, loss, self.bounds, call.positional())
        with buffers_kept(module):
            draws = model_draws(module, call.random(2, 0))
        release = make_release(
            self.shards, plan, allocation or Equal(), self.noise_multiplier, self.expected_batch_size,
            slack=[1.0] * len(plan.layers), in_pieces=max_physical_batch_size is not None, views=self.views,
            grid=check_grid(release_grid), knorm=mechanism,
            exact=GridSums(self.b_max * self.views, self.loader.pieces_of_all) if exact_sums else None,
        )  # fmt: skip
        layers, group = {path: module.get_submodule(path) for path in plan.layers}, tile_group(self.b_max)
        products = {k: self.bounds.product.resolve(layer, self.device, group) for k, layer in layers.items()}
        entrywise = None if mechanism is None else Entrywise(loss, mechanism.p)
        training = Training(self, module, plan, call, release, products, entrywise, draws)
        self.optimizer, self.criterion = optimizer, PrivateCriterion(criterion, loss, self)
        try:
            self._start(training, data_loader.dataset, max_physical_batch_size)
        except BaseException:
            uninstall(training)
            self._training = None
            raise
        self.model = module
        if not self.streams.is_secure:
            self.streams = self.loader.streams = self.streams.settled(settings_digest(self))
        return module, optimizer, self.loader, self.criterion

    def _start(self, training: Training, dataset: Any, physical: int | None) -> None:
        """Put the run on its model; whatever is refused here is refused before anything was released."""
        self._training = training
        install(training)
        size = min(math.ceil(self.expected_batch_size), physical or 2**31)
        training.test = functools.partial(test_records, training)
        key = training.entrance.first, training.watch.modes()
        tested = training.test(*key, size=size)
        if training.strays:  # F.linear(x, embedding.weight): their layers follow the parameter wherever it is used
            uninstall(training)
            install(training)
            tested = training.test(*key, size=size)
        refuse_unused(training)
        self.output_shape = output_shape(training, tested)
        check_labels(dataset, self.output_shape, self.criterion.loss)
        size_up(training)
        training.tested[key] = tested
        sensitivity, release = training.sensitivity, training.release
        release.scales(release.sensitivities(sensitivity.evaluate()))
        agree_on_run(self)
        if self._ledger is not None:
            self._ledger.begin(self._mechanism(1), self.adjacency, TAIL, _report.public_constants(self))
        training.clip()
        sensitivity.values = release.sensitivities(sensitivity.evaluate())
        sensitivity.set_limits()

    def make_private_with_epsilon(
        self, *, target_epsilon: float, target_delta: float, epochs: float, data_loader: DataLoader, **settings: Any
    ) -> tuple[nn.Module, torch.optim.Optimizer, PoissonLoader, PrivateCriterion]:
        """Make training private with a total budget: sigma is the smallest that keeps epsilon after ``epochs`` passes.

        Takes every argument of :meth:`make_private` but ``noise_multiplier``. When the budget is spent the loader ends
        with a warning and a further ``step()`` raises :class:`weightclip.BudgetSpent`. Charges that a ledger holds
        already count in the budget, in steps and in epsilon.

        Formal guarantees:
            Those of the class, with ``get_epsilon(target_delta) <= target_epsilon`` however long the loop runs.
        """
        if "noise_multiplier" in settings:
            raise WeightclipError("make_private_with_epsilon chooses noise_multiplier: use make_private to set it.")
        if not epochs > 0:
            raise WeightclipError(f"epochs must be positive, got {epochs!r}.")
        q = _sample_rate(data_loader, settings.get("sample_rate"))
        steps = max(1, round(epochs * max(1, round(1 / q))))
        adjacency = settings.get("adjacency", Adjacency.ADD_OR_REMOVE_ONE)
        batch = settings.get("expected_batch_size") or data_loader.batch_size
        n = None if batch is None else batch / q  # the public number of records
        if n is not None and 0 < target_delta < 1 and target_delta >= 1 / n:
            warnings.warn(f"target_delta = {target_delta:g} is not below 1/{n:g}: choose it far smaller.", stacklevel=2)
        left = target_delta - max(steps, self.steps) * TAIL if 0 < target_delta < 1 else target_delta
        spend = (target_epsilon, left, q, steps, self.accountant, adjacency)
        sigma = 1 / calibrate_epsilon0(*spend) if settings.get("mechanism") else calibrate_sigma(*spend)
        if self._ledger is not None:
            sigma = self._ledger.sigma_within(sigma, bool(settings.get("mechanism")), *spend)
        sigma = self.ranks.tell(functools.partial(float, sigma))  # calibrated alike everywhere, to the last bit
        self.budget = max(steps, self.steps)
        self.target_epsilon, self.target_delta = target_epsilon, target_delta
        return self.make_private(data_loader=data_loader, noise_multiplier=sigma, **settings)

    def detach(self, *, keep_projection: bool = True) -> nn.Module:
        """Take the engine off: hooks removed, layers native again, weights as they are, the ledger free for others.

        With ``input_radius`` the model was trained on projected inputs, and that projection stays on as an ordinary
        forward pre-hook, so that the model goes on computing what was trained. A state_dict holds no hooks: a plain
        model that loads it needs ``weightclip.nn.Project(radius)`` in front. ``keep_projection=False`` removes it.
        """
        if self._ledger is not None:
            self._ledger.close()
        if self.model is None or not self.training.handles:
            raise ContractError("this engine has no private model: call make_private first.")
        uninstall(self.training)
        for path, radius in self.bounds.projections().items() if keep_projection else ():
            part = self.model.get_submodule(path)
            part.register_forward_pre_hook(InputProjection(radius, self.bounds.p != 2), with_kwargs=True)
        return self.model

    @property
    def plan(self) -> Plan | OpenPlan:
        """The layers and what limits them."""
        return self.training.plan

    @property
    def ledger(self) -> Ledger | SharedLedger | None:
        """The file that counts the releases, if there is one."""
        return self._ledger

    @property
    def noise_multiplier(self) -> float:
        """sigma, fixed by :meth:`make_private`: every release has this one, and is priced with it."""
        return self._sigma

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        raise ContractError(
            "noise_multiplier is fixed by make_private: the noise would stay as it is, and releases that were made "
            "would get another price. Train in phases instead, each by an engine of its own on one ledger."
        )

    # -- what was spent ---------------------------------------------------------------------------------------------

    def mechanisms(self) -> list[Mechanism]:
        """What was released so far, as the accountant sees it; with a ledger, by all its runs."""
        if self._ledger is not None:
            return self._ledger.mechanisms()
        return [self._mechanism(self.steps)] if self.steps else []

    def _mechanism(self, steps: int) -> Mechanism:
        """``steps`` releases of this engine."""
        q, sigma = self.loader.sample_rate, self.noise_multiplier
        knorm = self.training.release.knorm
        if knorm is not None and sigma > 0:
            label = f"noisy gradients ({knorm})"
            return Mechanism("pure", None, q, steps, 1 / sigma, label=label)
        label = "noisy gradients" if self.bounds.adaptive is None else "noisy gradients and quantiles"
        return Mechanism("gaussian", sigma=sigma, q=q, steps=steps, label=label)

    def get_epsilon(self, delta: float) -> float:
        """epsilon of everything released so far, at ``delta``."""
        if self.model is None:
            raise ContractError("this engine has no model yet: call make_private first.")
        charged = delta - self.steps * TAIL  # the chance that a draw exceeded b_max (rounding slack)
        return epsilon(self.mechanisms(), charged, accountant=self.accountant, adjacency=self.adjacency)

    def certificate(self) -> Certificate:
        """The certificate at the present weights; its sensitivities carry the noise of the next step."""
        if self.model is None:
            raise ContractError("this engine has no model yet: call make_private first.")
        sensitivity = self.training.sensitivity
        evaluations = sensitivity.evaluate()
        if self.plan.graph is not None and not self.plan.needs_gains:  # shown all the same
            shown = self.plan.evaluate(numerics_for(self.device, sensitivity.autocast))
            for path, evaluation in evaluations.items():
                evaluation.gain = shown[path].gain
        return _report.as_released(self.plan.certificate(evaluations), self.training.release)

    def report(self, delta: float | None = None) -> dict[str, Any]:
        """A JSON-ready privacy statement: adjacency, constants, mechanisms, sensitivities, what is not covered."""
        return _report.privacy_report(self, delta)

    def card(self, delta: float | None = None, title: str = "Private model", **head: Any) -> str:
        """A model card made from :meth:`report`, for the Hugging Face hub; ``head`` adds to its YAML head."""
        return model_card(self.report(delta), title, head=head)

    def fused_step(self, compiled: Any = None) -> FusedStep:
        """``loss = step(x, y)``, a whole training step; on CUDA it is replayed as one graph (:class:`FusedStep`).

        ``compiled``: the private model as ``torch.compile`` returns it, if its kernels are to be used.
        """
        return FusedStep(self, compiled)

    # -- save and resume --------------------------------------------------------------------------------------------

    def save(self, path: Any) -> None:
        """Write weights, optimiser state and the accountant's ledger to a folder, atomically."""
        _checkpoint.save(self, path)

    def load(self, path: Any, *, exact: bool = False) -> None:
        """Resume from :meth:`save`. By default with fresh noise, charging replayed steps again.

        With a ledger the count is the ledger's, never the checkpoint's. Without one, releases made after the checkpoint
        was saved are known to nobody: a warning and ``report()["not_covered"]`` say so. ``exact=True`` (only with
        ``generator=``) continues the same noise and draws, on the same data set, which a keyed hash checks.
        """
        with readable(path):
            _checkpoint.load(self, path, exact=exact)


def _sample_rate(data_loader: DataLoader, rate: float | None) -> float:
    return PoissonLoader(
        data_loader, sample_rate=rate, streams=Streams.secure(), on_batch=lambda info: None
    ).sample_rate


def engine_of(model: nn.Module) -> PrivacyEngine | None:
    """The engine that made a model (or the model inside a compiled one) private, if it is still there."""
    model = getattr(model, "_orig_mod", model)
    for hook in forward_hooks(model):
        if isinstance(hook, OutputGate) and hook.owner is not None:
            owner = hook.owner()
            return None if owner is None else owner.engine
    return None


def _certificate_of(model: nn.Module) -> Certificate | None:
    engine = engine_of(model)
    return None if engine is None else engine.certificate()


KNOWN.append(_certificate_of)
