"""Layers a network with bounded gains needs. Plain torch modules: they work with and without the privacy engine.

Records lie on dimension 0 everywhere, and no layer ever mixes two of them.

Imports no other room; anybody may import it.
"""

from __future__ import annotations

from weightclip.nn._averaging import ParameterAverage as ParameterAverage
from weightclip.nn._connect import Abs as Abs
from weightclip.nn._connect import ConvexResidual as ConvexResidual
from weightclip.nn._connect import GroupSort as GroupSort
from weightclip.nn._connect import MaxMin as MaxMin
from weightclip.nn._connect import Residual as Residual
from weightclip.nn._norm import Project as Project
from weightclip.nn._norm import SafeGroupNorm as SafeGroupNorm
from weightclip.nn._norm import SafeInstanceNorm as SafeInstanceNorm
from weightclip.nn._norm import SafeLayerNorm as SafeLayerNorm
from weightclip.nn._norm import UnitNorm as UnitNorm
from weightclip.nn._norm import safe_normalise as safe_normalise
from weightclip.nn._pool import BlurPool2d as BlurPool2d
from weightclip.nn._pool import L2Pool2d as L2Pool2d
from weightclip.nn._pool import NormPool2d as NormPool2d
from weightclip.nn._pool import ScaledAvgPool2d as ScaledAvgPool2d
from weightclip.nn._scattering import Scattering2d as Scattering2d
from weightclip.nn._standardized import StandardizedConv2d as StandardizedConv2d
