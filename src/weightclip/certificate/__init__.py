"""From a model to its certificate: trace, plan, gains. It says what limits are needed and when they never act, no more.

Imports `bounds`, `factors` and `losses`; imported by `audit`, `engine`, `integrations`, `noise` and `tabular`.
"""

from __future__ import annotations

from weightclip.certificate._bank import NormBank as NormBank
from weightclip.certificate._bounds import Adaptive as Adaptive
from weightclip.certificate._bounds import Bounds as Bounds
from weightclip.certificate._bounds import Certified as Certified
from weightclip.certificate._bounds import PerLayer as PerLayer
from weightclip.certificate._gains import Gains as Gains
from weightclip.certificate._gains import WeightClipper as WeightClipper
from weightclip.certificate._gains import exact_products as exact_products
from weightclip.certificate._gains import numerics_for as numerics_for
from weightclip.certificate._open import Certificate as Certificate
from weightclip.certificate._open import Evaluation as Evaluation
from weightclip.certificate._open import LayerUse as LayerUse
from weightclip.certificate._open import OpenPlan as OpenPlan
from weightclip.certificate._open import Row as Row
from weightclip.certificate._plan import KNOWN as KNOWN
from weightclip.certificate._plan import Plan as Plan
from weightclip.certificate._plan import build_plan as build_plan
from weightclip.certificate._plan import certify as certify
