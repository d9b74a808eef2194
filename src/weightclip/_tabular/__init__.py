"""Tables for private training: public schemas, raw values, encoders that pay for what they read, model folders."""

from ._columns import Column as Column
from ._columns import Schema as Schema
from ._encoder import Encoder as Encoder
from ._encoder import Fitted as Fitted
from ._table import Table as Table
