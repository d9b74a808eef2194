"""``weightclip certify``: check what a model folder claims."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Annotated, Any

import typer

from weightclip.errors import WeightclipError


def certify(
    model: Annotated[Path, typer.Argument(help="model folder")],
    as_json: Annotated[bool, typer.Option("--json", help="print the result as JSON")] = False,
) -> None:
    """Check a model folder: files unchanged, epsilon recomputed from its mechanisms, a certificate of its layers.

    Example: weightclip certify model/
    """
    from weightclip.tabular import Model, recompute
    from weightclip.tabular import folder as _folder

    tensors, pipeline, report = _folder.load(model)
    fitted = Model.load(tensors, pipeline)
    try:
        claimed, found = float(report["epsilon"]), recompute(report)
        delta, public, layers = report["delta"], report["public"], report["layers"]
        steps, q, settings = public["steps"], public["sample_rate"], public["settings"]
        sigma = next(m["sigma"] for m in report["mechanisms"] if m["steps"] == steps and m["q"] == q)
    except (KeyError, TypeError, ValueError, OverflowError, ZeroDivisionError, StopIteration) as error:
        raise WeightclipError(
            f"model {model}: its privacy report is not complete ({type(error).__name__}: {error})."
        ) from error
    if not found <= claimed * (1 + 1e-6):  # also where one of them is no number
        raise WeightclipError(
            f"model {model} claims epsilon {claimed:.6g}, but its mechanisms amount to {found:.6g} at delta {delta:g}."
        )
    _check_noise(layers, sigma, settings.get("joint_cap") is not None, model)
    tuned = "lora" in pipeline.get("text", ())  # attention has no Lipschitz constant: caps alone bound what is trained
    certificate = None if tuned else _certificate(fitted, settings)
    unpaid = [s for s in report["preprocessing"] if s.startswith("NOT PRIVATE")]
    if as_json:
        result: dict[str, Any] = {
            "epsilon": report["epsilon"], "epsilon_recomputed": found, "delta": delta, "unpaid": unpaid,
            "certificate": None if certificate is None else json.loads(certificate.to_json()),
        }  # fmt: skip
        print(json.dumps(result))
        return
    print("files          unchanged")
    print(f"mechanisms     epsilon {found:.6g} at delta {delta:g}, claimed {report['epsilon']}")
    for line in unpaid:
        print(f"preprocessing  {line}")
    if certificate is None:
        capped = f"one cap of {settings['joint_cap']:g} on each record's gradient over all of them"
        print(f"layers         {len(layers)}, {capped}")
    else:
        print(certificate)


def _check_noise(layers: list[dict[str, Any]], sigma: float, joint: bool, model: Path) -> None:
    """The noise of every layer has to carry the stated multiplier for the stated sensitivities."""
    ratios = [layer["noise"] / layer["sensitivity"] for layer in layers]
    worst = min(ratios)
    reached = worst if joint or worst == 0 else sum(r**-2 for r in ratios) ** -0.5
    if sigma is None or not math.isfinite(reached) or not reached >= sigma * (1 - 1e-6):
        raise WeightclipError(
            f"model {model}: its noise has multiplier {reached:.6g}, its report says {sigma or 0:.6g}."
        )


def _certificate(fitted, settings: dict[str, Any]):
    import torch

    import weightclip as wc
    from weightclip import losses

    module = fitted.to_torch()
    last = module.layers[-1]
    with torch.no_grad():  # training saw the outputs before the temperature
        last.weight.mul_(settings["temperature"])  # type: ignore[union-attr,operator]
        last.bias.mul_(settings["temperature"])  # type: ignore[union-attr,operator]
    cap = settings["cap"]
    if fitted.task == "regression":
        loss: Any = losses.L1() if cap is None else losses.Huber(delta=cap)
    elif fitted.outputs == 1:
        loss = losses.BCEWithLogits(temperature=settings["temperature"], scale_by_temperature=True, cap=cap)
    else:
        loss = losses.CrossEntropy(temperature=settings["temperature"], scale_by_temperature=True, cap=cap)
    joint = settings["joint_cap"]
    bounds = wc.Bounds(
        input_radius=fitted.encoder.radius * (1 + 1e-6),  # where the encoder puts every record
        bias_scale=settings["bias_scale"], weight_norm=settings["weight_norm"],
        joint_cap=joint[0] if isinstance(joint, list) else joint,
    )  # fmt: skip
    return wc.certify(module, loss, example=torch.zeros(1, fitted.encoder.width), bounds=bounds)
