"""weightclip: differentially private training at the speed and memory of ordinary training.

This is the door: everything a user needs is a name here or in one of the public packages below. Names are looked up
when they are first used, so that ``import weightclip`` costs next to nothing beside ``import torch``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # what type checkers and editors read; `_HOMES` below is what Python reads, and a test compares them
    from weightclip import accounting as accounting
    from weightclip import audit as audit
    from weightclip import bounds as bounds
    from weightclip import integrations as integrations
    from weightclip import losses as losses
    from weightclip import models as models
    from weightclip import nn as nn
    from weightclip import noise as noise
    from weightclip import sampling as sampling
    from weightclip import search as search
    from weightclip import text as text
    from weightclip.accounting import Adjacency as Adjacency
    from weightclip.bounds import Bjorck as Bjorck
    from weightclip.bounds import Effect as Effect
    from weightclip.bounds import Rescale as Rescale
    from weightclip.bounds import SpectralProjection as SpectralProjection
    from weightclip.bounds import Sphere as Sphere
    from weightclip.bounds import operator_norm_bound as operator_norm_bound
    from weightclip.bounds import register_rule as register_rule
    from weightclip.certificate import Adaptive as Adaptive
    from weightclip.certificate import Bounds as Bounds
    from weightclip.certificate import Certificate as Certificate
    from weightclip.certificate import Certified as Certified
    from weightclip.certificate import certify as certify
    from weightclip.engine import PrivacyEngine as PrivacyEngine
    from weightclip.engine import explain as explain
    from weightclip.engine import make_compatible as make_compatible
    from weightclip.errors import BudgetSpent as BudgetSpent
    from weightclip.errors import CertificationError as CertificationError
    from weightclip.errors import ContractError as ContractError
    from weightclip.errors import WeightclipError as WeightclipError
    from weightclip.factors import CapNorm as CapNorm
    from weightclip.factors import Product as Product
    from weightclip.factors import register_layer as register_layer
    from weightclip.losses import PerRecordLoss as PerRecordLoss
    from weightclip.noise import AdamAware as AdamAware
    from weightclip.noise import Equal as Equal
    from weightclip.noise import Global as Global
    from weightclip.noise import KNorm as KNorm
    from weightclip.noise import LeastVariance as LeastVariance
    from weightclip.sampling import ArrayDataset as ArrayDataset
    from weightclip.sampling import ArrowDataset as ArrowDataset
    from weightclip.tabular import LipDPClassifier as LipDPClassifier
    from weightclip.tabular import LipDPRegressor as LipDPRegressor

__version__ = "0.2.0"

_HOMES = {
    "weightclip.accounting": "Adjacency",
    "weightclip.bounds": "Bjorck Effect Rescale SpectralProjection Sphere operator_norm_bound register_rule",
    "weightclip.certificate": "Adaptive Bounds Certificate Certified certify",
    "weightclip.engine": "PrivacyEngine explain make_compatible",
    "weightclip.errors": "BudgetSpent CertificationError ContractError WeightclipError",
    "weightclip.factors": "CapNorm Product register_layer",
    "weightclip.losses": "PerRecordLoss",
    "weightclip.noise": "AdamAware Equal Global KNorm LeastVariance",
    "weightclip.sampling": "ArrayDataset ArrowDataset",
    "weightclip.tabular": "LipDPClassifier LipDPRegressor",
}
_PACKAGES = (
    "accounting", "audit", "bounds", "integrations", "losses", "models", "nn", "noise", "sampling", "search", "text",
)  # fmt: skip

_HOME = {name: home for home, names in _HOMES.items() for name in names.split()}

__all__ = [*_PACKAGES, *_HOME]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return import_module(f"weightclip.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'weightclip' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
