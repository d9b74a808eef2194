"""Audits of the studies' own code: the printed algorithms, which must be caught, and the image heads' trainer.

``weightclip-study audit`` runs them together with everything that ``weightclip audit`` runs.
"""

from __future__ import annotations

from weightclip_studies.audit._extra import extra_audits as extra_audits
from weightclip_studies.audit._heads import head_check as head_check
from weightclip_studies.audit._heads import head_trainers as head_trainers
from weightclip_studies.audit._printed import catch_printed as catch_printed
