"""The data of the study: seven tabular sets that ship with the package, and three image sets found or fetched.

Feature statistics are a privacy matter: `PublicRanges` reads nothing from the data, `PrivateQuantiles` pays for what
it reads, `FromData` does not pay and says so.

>>> from weightclip_studies import data
>>> data.names()
('adult', 'android', 'breast_cancer', 'default_credit', 'dropout', 'german_credit', 'nursery')
>>> table = data.load("german_credit")
>>> parts = data.split(table, seed=0)
>>> encoded = data.encode(table, fit_on=parts.train, statistics=data.PublicRanges())
>>> encoded.X.shape, encoded.y.shape, len(parts.train), len(parts.valid), len(parts.test)
((1000, 63), (1000,), 640, 160, 200)
"""

from ._encode import Encoded as Encoded
from ._encode import OneHot as OneHot
from ._encode import Ordinal as Ordinal
from ._encode import encode as encode
from ._fetch import fetch as fetch
from ._images import image_file_names as image_file_names
from ._images import image_files as image_files
from ._images import image_names as image_names
from ._images import load_images as load_images
from ._images import read_checked as read_checked
from ._schema import Description as Description
from ._schema import Feature as Feature
from ._schema import describe as describe
from ._schema import names as names
from ._statistics import FromData as FromData
from ._statistics import PaidQuery as PaidQuery
from ._statistics import PrivateQuantiles as PrivateQuantiles
from ._statistics import PublicRanges as PublicRanges
from ._statistics import Statistics as Statistics
from ._table_schema import table_schema as table_schema
from ._tabular import Split as Split
from ._tabular import TabularData as TabularData
from ._tabular import load as load
from ._tabular import split as split
