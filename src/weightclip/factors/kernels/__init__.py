"""GPU code of the products, of projections and of losses; every kernel has a plain form that it is tested against.

For `factors`, and for `losses`, `noise` and `engine` where one launch replaces many.
"""

from __future__ import annotations

from weightclip.factors.kernels._one_launch import cross_entropy as cross_entropy
from weightclip.factors.kernels._one_launch import fits as fits
from weightclip.factors.kernels._one_launch import fits_classes as fits_classes
from weightclip.factors.kernels._one_launch import project as project
from weightclip.factors.kernels._one_launch import scale_blocks_ as scale_blocks_
