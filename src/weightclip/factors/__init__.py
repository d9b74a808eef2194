"""Bounded factors inside the weight-gradient product: no per-sample gradient, any architecture in between."""

from weightclip.factors._collector import Collector as Collector
from weightclip.factors._collector import Entry as Entry
from weightclip.factors._collector import Limits as Limits
from weightclip.factors._kinds import Measure as Measure
from weightclip.factors._limits import Product as Product
from weightclip.factors._limits import is_plain as is_plain
from weightclip.factors._limits import plain_forward as plain_forward
from weightclip.factors._record_norms import CapNorm as CapNorm
from weightclip.factors._swap import is_private as is_private
from weightclip.factors._swap import make_layer_plain as make_layer_plain
from weightclip.factors._swap import make_layer_private as make_layer_private
from weightclip.factors._tiles import tile_rounding as tile_rounding
