"""Text: public sentence encoders, tables in files whose text column is read through one, and their fine-tuning.

Needs the extra `text` where an encoder is loaded. Imports `engine`, `losses`, `nn`, `noise` and `tabular`; imported by
`cli`.
"""

from __future__ import annotations

from weightclip.text._encoder import ENCODERS as ENCODERS
from weightclip.text._encoder import TextEncoder as TextEncoder
from weightclip.text._encoder import load_encoder as load_encoder
from weightclip.text._encoder import pooled as pooled
from weightclip.text._file import TextFile as TextFile
from weightclip.text._file import TokenFile as TokenFile
from weightclip.text._file import from_pipeline as from_pipeline
from weightclip.text._finetune import Tuned as Tuned
from weightclip.text._finetune import fit_lora as fit_lora
from weightclip.text._lora import Lora as Lora
from weightclip.text._lora import Update as Update
