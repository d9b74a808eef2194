"""Text: public sentence encoders, and tables in files whose text column is read through one.

Imports `tabular`; used by the command line. Needs the extra `text` where an encoder is loaded.
"""

from __future__ import annotations

from weightclip.text._encoder import ENCODERS as ENCODERS
from weightclip.text._encoder import TextEncoder as TextEncoder
from weightclip.text._encoder import load_encoder as load_encoder
from weightclip.text._encoder import pooled as pooled
from weightclip.text._file import TextFile as TextFile
from weightclip.text._file import from_pipeline as from_pipeline
