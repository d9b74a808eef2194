"""Bounded factors inside the weight-gradient product: no per-sample gradient, any architecture in between.

Its GPU code is in `kernels`. Imports `nn`; imported by `audit`, `certificate`, `engine`, `losses`, `noise` and
`sampling`.
"""

from weightclip.factors import _attention as _attention  # these register private forms
from weightclip.factors import _layers as _layers
from weightclip.factors import _recurrent as _recurrent
from weightclip.factors import _routes as _routes  # and this the products of operators
from weightclip.factors._collector import Collector as Collector
from weightclip.factors._collector import Entry as Entry
from weightclip.factors._conv import conv_weights as conv_weights
from weightclip.factors._copies import Copied as Copied
from weightclip.factors._kind import Measure as Measure
from weightclip.factors._limits import BOUND as BOUND
from weightclip.factors._limits import CAP as CAP
from weightclip.factors._limits import Eager as Eager
from weightclip.factors._limits import Limits as Limits
from weightclip.factors._limits import Product as Product
from weightclip.factors._limits import is_plain as is_plain
from weightclip.factors._limits import plain_forward as plain_forward
from weightclip.factors._limits import transforming as transforming
from weightclip.factors._record_norms import CHANNEL as CHANNEL
from weightclip.factors._record_norms import EXACT as EXACT
from weightclip.factors._record_norms import FREE as FREE
from weightclip.factors._record_norms import CapNorm as CapNorm
from weightclip.factors._record_norms import Geometry as Geometry
from weightclip.factors._record_norms import conv_record_norm as conv_record_norm
from weightclip.factors._register import Products as Products
from weightclip.factors._register import register_layer as register_layer
from weightclip.factors._swap import count_into as count_into
from weightclip.factors._swap import families as families
from weightclip.factors._swap import is_held as is_held
from weightclip.factors._swap import is_private as is_private
from weightclip.factors._swap import know_parameters as know_parameters
from weightclip.factors._swap import limits_of as limits_of
from weightclip.factors._swap import limits_set as limits_set
from weightclip.factors._swap import make_layer_plain as make_layer_plain
from weightclip.factors._swap import make_layer_private as make_layer_private
from weightclip.factors._swap import products_as_gradients as products_as_gradients
from weightclip.factors._swap import trained as trained
from weightclip.factors.kernels._tiles import tile_additions as tile_additions
from weightclip.factors.kernels._tiles import tile_group as tile_group
from weightclip.factors.kernels._tiles import tile_rounding as tile_rounding
