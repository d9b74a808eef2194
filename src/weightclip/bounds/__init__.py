"""What one operator does to norms: the rule book, and certified operator norms.

Imports `nn`; imported by `certificate` and `noise`.
"""

from weightclip.bounds import _elementwise as _elementwise  # rules register themselves on import
from weightclip.bounds import _merge as _merge
from weightclip.bounds import _normalise as _normalise
from weightclip.bounds import _pool as _pool
from weightclip.bounds import _shape as _shape
from weightclip.bounds._clipping import Bjorck as Bjorck
from weightclip.bounds._clipping import Rescale as Rescale
from weightclip.bounds._clipping import SpectralProjection as SpectralProjection
from weightclip.bounds._clipping import Sphere as Sphere
from weightclip.bounds._clipping import Strategy as Strategy
from weightclip.bounds._clipping import clip_weights_ as clip_weights_
from weightclip.bounds._conv import gain_is_norm as gain_is_norm
from weightclip.bounds._conv import kernel_overlap as kernel_overlap
from weightclip.bounds._dense import positions as positions
from weightclip.bounds._layer import LayerRule as LayerRule
from weightclip.bounds._layer import Numerics as Numerics
from weightclip.bounds._layer import layer_rule as layer_rule
from weightclip.bounds._layer import register_layer as register_layer
from weightclip.bounds._layer_norms import effective_weight as effective_weight
from weightclip.bounds._layer_norms import is_layer as is_layer
from weightclip.bounds._layer_norms import layer_norm_tensor as layer_norm_tensor
from weightclip.bounds._layer_norms import norm_function as norm_function
from weightclip.bounds._layer_norms import operator_norm_bound as operator_norm_bound
from weightclip.bounds._narrow import narrow_norm as narrow_norm
from weightclip.bounds._narrow import row_frobenius as row_frobenius
from weightclip.bounds._operator_norms import dense_norm as dense_norm
from weightclip.bounds._operator_norms import gram_iteration as gram_iteration
from weightclip.bounds._operator_norms import largest_eigenvalues as largest_eigenvalues
from weightclip.bounds._operator_norms import spectral_norm as spectral_norm
from weightclip.bounds._operator_norms import spectral_number as spectral_number
from weightclip.bounds._proved import proved_eigenvalue as proved_eigenvalue
from weightclip.bounds._rule import Edge as Edge
from weightclip.bounds._rule import Effect as Effect
from weightclip.bounds._rule import Op as Op
from weightclip.bounds._rule import Rule as Rule
from weightclip.bounds._rule import Scalar as Scalar
from weightclip.bounds._rule import Shape as Shape
from weightclip.bounds._rule import least as least
from weightclip.bounds._rule import module_rule as module_rule
from weightclip.bounds._rule import operator_rule as operator_rule
from weightclip.bounds._rule import plus as plus
from weightclip.bounds._rule import register_rule as register_rule
from weightclip.bounds._rule import root as root
from weightclip.bounds._rule import times as times
