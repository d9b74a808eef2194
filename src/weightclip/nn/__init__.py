"""Layers a network with bounded gains needs. Plain torch modules: they work with and without the privacy engine.

Records lie on dimension 0 everywhere, and no layer ever mixes two of them.
"""

from __future__ import annotations

from ._averaging import ParameterAverage as ParameterAverage
from ._norm import SafeGroupNorm as SafeGroupNorm
from ._norm import SafeInstanceNorm as SafeInstanceNorm
from ._norm import SafeLayerNorm as SafeLayerNorm
from ._pool import BlurPool2d as BlurPool2d
from ._pool import L2Pool2d as L2Pool2d
from ._pool import NormPool2d as NormPool2d
from ._pool import ScaledAvgPool2d as ScaledAvgPool2d
from ._project import Project as Project
from ._project import UnitNorm as UnitNorm
from ._residual import ConvexResidual as ConvexResidual
from ._residual import Residual as Residual
from ._scattering import Scattering2d as Scattering2d
from ._sort import Abs as Abs
from ._sort import GroupSort as GroupSort
from ._sort import MaxMin as MaxMin
from ._standardized import StandardizedConv2d as StandardizedConv2d
