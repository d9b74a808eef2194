"""Epsilon of what was released, the cost of a search, and the ledger that charges on disk.

Imports no other room; anybody may import it.
"""

from __future__ import annotations

from weightclip.accounting._accounting import RDP_ORDERS as RDP_ORDERS
from weightclip.accounting._accounting import NegativeBinomialRuns as NegativeBinomialRuns
from weightclip.accounting._accounting import PoissonRuns as PoissonRuns
from weightclip.accounting._accounting import calibrate_sigma as calibrate_sigma
from weightclip.accounting._accounting import delta as delta
from weightclip.accounting._accounting import epsilon as epsilon
from weightclip.accounting._accounting import gdp_delta as gdp_delta
from weightclip.accounting._accounting import gdp_epsilon as gdp_epsilon
from weightclip.accounting._accounting import gdp_estimate as gdp_estimate
from weightclip.accounting._accounting import gdp_mu as gdp_mu
from weightclip.accounting._accounting import search_cost as search_cost
from weightclip.accounting._composition import Adjacency as Adjacency
from weightclip.accounting._composition import Mechanism as Mechanism
from weightclip.accounting._ledger import Ledger as Ledger
from weightclip.accounting._ledger_format import read as read
