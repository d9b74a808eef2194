"""weightclip: differentially private training at the speed and memory of ordinary training."""

from typing import TYPE_CHECKING, Any

from weightclip import losses as losses
from weightclip import models as models
from weightclip import nn as nn
from weightclip._adaptive import Adaptive as Adaptive
from weightclip._knorm import KNorm as KNorm
from weightclip.accounting import Adjacency as Adjacency
from weightclip.bounds import Effect as Effect
from weightclip.bounds import operator_norm_bound as operator_norm_bound
from weightclip.bounds import register_rule as register_rule
from weightclip.certificate import Certificate as Certificate
from weightclip.certificate import certify as certify
from weightclip.clipping import Bjorck as Bjorck
from weightclip.clipping import Rescale as Rescale
from weightclip.clipping import SpectralProjection as SpectralProjection
from weightclip.clipping import Sphere as Sphere
from weightclip.config import Bounds as Bounds
from weightclip.config import Certified as Certified
from weightclip.engine import PrivacyEngine as PrivacyEngine
from weightclip.errors import BudgetSpent as BudgetSpent
from weightclip.errors import CertificationError as CertificationError
from weightclip.errors import ContractError as ContractError
from weightclip.errors import WeightclipError as WeightclipError
from weightclip.factors import CapNorm as CapNorm
from weightclip.factors import Product as Product
from weightclip.losses import PerRecordLoss as PerRecordLoss
from weightclip.mechanisms import AdamAware as AdamAware
from weightclip.mechanisms import Equal as Equal
from weightclip.mechanisms import Global as Global
from weightclip.mechanisms import LeastVariance as LeastVariance
from weightclip.sampling import ArrayDataset as ArrayDataset

if TYPE_CHECKING:
    from weightclip.estimators import LipDPClassifier as LipDPClassifier
    from weightclip.estimators import LipDPRegressor as LipDPRegressor

__version__ = "0.1.0"
_LAZY = ("LipDPClassifier", "LipDPRegressor")  # they need scikit-learn, which takes long to import


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'weightclip' has no attribute '{name}'")
    from weightclip import estimators

    return getattr(estimators, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
